"""The same run on many machines, with Flower as the engine.

records.py       a frame of bytes as a Flower record        server_app.py  the ServerApp
link.py          frames to sites and back, over the Grid    client_app.py  the ClientApp
-- only these four import Flower --
frame.py         requests and replies as bytes              engine.py      the engine, over any link
desk.py          what a site answers                        consent.py     what a site agrees to
site_file.py     a site's own file                          memory.py      what a site keeps
"""
