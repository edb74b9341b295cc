"""A light start: nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deltafin

HEAVY = {"torch", "numba", "triton", "numpy", "tiktoken", "safetensors", "huggingface_hub", "prompt_toolkit"}


def imported_by(code: str) -> set[str]:
    """The modules in a fresh process after ``code``."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    root = Path(deltafin.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import deltafin; deltafin.__version__; dir(deltafin)",
        "import deltafin.cli",
        "from deltafin.cli import main; main(['--help'], standalone_mode=False)",
        "import deltafin; deltafin.DeltafinError; import deltafin.config",
    ],
)
def test_torch_waits_until_a_model_is_loaded(code):
    assert imported_by(code) & HEAVY == set()


def test_the_plain_runtime_needs_no_compiler():
    modules = imported_by("import deltafin; deltafin.load('nano', backend='reference').logits([1, 2])")
    assert "torch" in modules
    assert modules & {"numba", "triton", "rich", "prompt_toolkit", "huggingface_hub", "click"} == set()


def test_every_public_name_is_there():
    for name in deltafin.__all__:
        assert getattr(deltafin, name) is not None
    assert set(deltafin.__all__) <= set(dir(deltafin))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = deltafin.nothing


def test_every_text_file_is_opened_as_utf_8():
    opening = {"open", "fdopen", "read_text", "write_text", "TemporaryFile", "NamedTemporaryFile"}
    package, seen = Path(deltafin.__file__).parent, 0
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in opening:
                modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
                encoding = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("encoding")
                fine = (
                    encoding == "'utf-8'"
                    or {"rb", "wb", "ab+"} & set(modes)
                    or ast.unparse(node.func) in ("Tokenizer.open", "os.open")
                )
                assert fine, f"{file}:{node.lineno}"
                seen += 1
    assert seen > 3
