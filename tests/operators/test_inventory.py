"""The inventory of a machine: a package counts only if everything that its use imports can be imported."""

from __future__ import annotations

import sys
from unittest import mock

from groupbench.operators import inventory


def test_a_tritonbench_without_its_imports_is_reported(tmp_path, monkeypatch):
    utils = tmp_path / "tritonbench" / "utils"
    utils.mkdir(parents=True)
    for folder in (utils.parent, utils):
        (folder / "__init__.py").touch()
    (utils / "run_utils.py").touch()
    (utils / "triton_op.py").write_text("import a_table_maker_that_is_not_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(sys.modules):  # so that an installed one is imported again afterwards
        for name in [name for name in sys.modules if name.split(".")[0] == "tritonbench"]:
            del sys.modules[name]
        error = inventory._import_error("tritonbench")
        assert error == "ModuleNotFoundError: No module named 'a_table_maker_that_is_not_here'"
        (utils / "triton_op.py").write_text("")
        assert inventory._import_error("tritonbench") is None
