"""The benchmarks of the four papers, read from a hub, from `datasets` directories or from their authors' files.

Each module of this package registers what it defines.
"""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
