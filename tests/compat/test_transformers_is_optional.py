"""Without transformers, `register` says how to install it."""

import sys

import pytest

from dilabench.compat.transformers import register


def test_register_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "dilabench.compat.transformers.interface", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'dilabench\[transformers\]'"):
        register()
