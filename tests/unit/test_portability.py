"""Every module can be imported where Unix's own modules are missing, as on Windows."""

from tests.processes import call, program

# What Python has on Unix alone is taken away before befit is imported; what befit's libraries need of it is there for
# them, for they look for it by themselves.
CODE = """
import importlib, multiprocessing.context, os, pkgutil, signal, socket, sys
import filelock, psutil, torch, transformers, peft, datasets, flwr.serverapp, flwr.clientapp

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
for name in [name for name in sys.modules if name.partition(".")[0] in ("befit", "tests")]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())
del signal.SIGHUP, socket.AF_UNIX, os.geteuid, os.fork
del multiprocessing.context._concrete_contexts["forkserver"]

import befit

for module in pkgutil.walk_packages(befit.__path__, "befit."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("befit.")]))
"""


def test_every_module_is_imported_without_what_only_unix_has() -> None:
    done = call(program, CODE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 250
