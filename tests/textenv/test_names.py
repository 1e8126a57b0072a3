"""A former public name says where it is; the hints of tables are tested in test_foreign.py."""

import pkgutil
import subprocess
import sys

import pytest

from tests.helpers.errors import refused
from textenv.foreign import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_public_name_says_where_it_is(former):
    package, _, name = former.rpartition(".")
    assert name not in pkgutil.resolve_name(package).__all__
    with refused(ImportError, f"{former} is {MOVED[former]}:") as error:
        exec(f"from {package} import {name}")
    names = {}
    exec(str(error.value).partition(": ")[2], names)
    assert names[name] is pkgutil.resolve_name(MOVED[former])


@pytest.mark.parametrize("module", ["algos.losses", "textenv.kl"])
def test_an_unimported_module_says_how_to_import_it(module):
    program = f"import algos, textenv\ntry: {module}\nexcept AttributeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"write 'import {module}' first" in done.stdout
