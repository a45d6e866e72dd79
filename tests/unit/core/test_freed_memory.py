"""What a process does with the memory that it frees."""

import os
import subprocess
import sys

import pytest

# Two hundred MiB in pieces that glibc takes from its heap, all freed: the resident memory before and after, in MiB.
CODE = """
import os
from befit.core.freed_memory import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

kept, before = keep_freed_memory(), resident()
pieces = [bytearray(b"x" * 100_000) for _ in range(2_000)]
del pieces
print(kept, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="glibc has the options")
@pytest.mark.parametrize(
    ("environment", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False), ({"GLIBC_TUNABLES": ""}, False)]
)
def test_freed_memory_is_kept_unless_the_environment_has_options_of_its_own(
    environment: dict[str, str], kept: bool
) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=inherited | environment, check=True, capture_output=True, text=True
    )
    said, grown = done.stdout.split()
    assert said == str(kept) and (int(grown) > 150) == kept
