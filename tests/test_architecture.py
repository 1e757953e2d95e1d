"""The house stands as designed: floors, doors, sizes, one docstring a folder, nothing of any one machine."""

import ast
import re
import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from quickseek import config_checks, formats
from quickseek.engine import blocks
from quickseek.ops import cache as cache_op

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "quickseek"
GROUND, ROOF = 0, 8
FLOORS = {"parallel": 1, "checkpoint": 2, "tokenizer": 2, "ops": 3, "model": 4, "decode": 5, "engine": 6, "serve": 7}
ROOF_MODULES = ("quickseek", "quickseek.cli", "quickseek.llm")
OPERATIONS = (
    *("quantize", "linear", "norm_rope", "mhc", "compressor", "indexer", "attention"),
    *("moe", "engram", "embedding", "head", "sampling", "collectives"),
)
KERNELS = {"cute", "triton"}
MORE_FILES = {
    "sampling": {"adjust_reference", "verify_reference", "parameters", "philox"},
    "engram": {"host_table"},
    "collectives": None,
}
"""Folders with several references or kernels: the names of the others' files, None for any."""
TEST_FOLDERS_BESIDE_SRC = {"golden", "protocol", "gpu", "e2e", "compile", "tools"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|tmp|mnt|Users)/\w")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

Sources = Mapping[str, str]


def package() -> dict[str, str]:
    """Dotted name of every module of the package to its text; a folder's name stands for its ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path.read_text(encoding="utf-8")
    return found


def written() -> dict[str, str]:
    """Every file that people wrote, by its path from the root; recorded numbers are not."""
    files = [path for folder in ("src", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run")]
    kinds = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ""}
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in files
        if path.is_file() and path.suffix in kinds
    }


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(tree: ast.AST, typing: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        yield child
        if typing or not _is_typing_only(child):
            yield from _nodes(child, typing)


parsed = cache(ast.parse)


@cache
def import_statements(text: str, typing: bool) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in _nodes(parsed(text), typing) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(name: str, sources: Sources, *, typing: bool = True) -> set[str]:
    """Modules of the package that a module imports, inside functions too; ``typing``: those for annotations as well."""
    found = set()
    for node in import_statements(sources[name], typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in sources else node.module)
    return {target for target in found if target == "quickseek" or target.startswith("quickseek.")}


def floor_of(module: str) -> int:
    if module in ROOF_MODULES:
        return ROOF
    parts = module.split(".")
    return FLOORS.get(parts[1], GROUND)


def upward(sources: Sources) -> list[str]:
    """Imports from a floor above."""
    pairs = ((name, target) for name in sources for target in sorted(imports(name, sources)))
    return [f"{name} imports {target}" for name, target in pairs if floor_of(target) > floor_of(name)]


def behind_doors(sources: Sources) -> list[str]:
    """Imports of what lies behind the door of an operation, from outside its folder."""
    found = []
    for name in sources:
        for target in sorted(imports(name, sources)):
            parts = target.split(".")
            folder = ".".join(parts[:3])
            inside = name == folder or name.startswith(f"{folder}.")
            behind = parts[1:2] == ["ops"] and len(parts) > 3 and parts[2] in OPERATIONS
            if behind and not inside:
                found.append(f"{name} imports {target}")
    return found


def cycle(sources: Sources) -> list[str]:
    """Modules that import each other in a circle when they are loaded or run; empty if there is none."""
    graph = {name: imports(name, sources, typing=False) & sources.keys() for name in sources}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_module_imports_from_a_floor_above() -> None:
    assert not upward(package())


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not cycle(package())


def test_operations_are_entered_by_their_doors() -> None:
    assert not behind_doors(package())


@pytest.mark.parametrize(
    ("module", "line", "check"),
    [
        ("quickseek.model.layer", "from quickseek.engine.runner import Runner", upward),
        ("quickseek.formats", "def late():\n    import quickseek.ops.cache", upward),
        ("quickseek.ops.rows", "from quickseek import llm", upward),
        ("quickseek.errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quickseek.cli", upward),
        ("quickseek.model.layer", "from quickseek.ops.mhc.reference import Mixes", behind_doors),
        ("quickseek.model.layer", "from quickseek.ops.mhc import reference", behind_doors),
        ("quickseek.ops.moe", "from quickseek.ops.mhc import reference", behind_doors),
        ("quickseek.model.moe", "from quickseek.model.layer import Layer", cycle),
        ("quickseek.errors", "def late():\n    from quickseek import config", cycle),
    ],
)
def test_a_planted_import_is_noticed(module: str, line: str, check: object) -> None:
    sources = package()
    assert callable(check) and not check(sources)
    assert check(sources | {module: f"{sources[module]}\n{line}\n"})


# ---------------------------------------------------------------------------------------------- sizes and shapes


def too_long(sources: Sources) -> list[str]:
    """Files above their limit: 600 lines, 800 for a kernel."""
    lengths = {name: text.count("\n") for name, text in sources.items()}
    return [name for name, lines in lengths.items() if lines > (800 if is_kernel(name.split(".")[-1]) else 600)]


def is_kernel(file: str) -> bool:
    """Whether a file of an operation holds kernels: ``triton``, ``triton_topk``, ``cute``."""
    return file.split("_")[0] in KERNELS


def misshapen(operation: str, files: set[str]) -> list[str]:
    """What is missing from the folder of an operation or does not belong there."""
    more = MORE_FILES.get(operation, set())
    missing = {"__init__", "reference"} - files
    extra = set() if more is None else {f for f in files if not is_kernel(f)} - {"__init__", "reference"} - more
    return sorted(missing | extra)


def test_files_are_short_and_most_are_shorter() -> None:
    sources = package()
    assert not too_long(sources)
    assert statistics.median(text.count("\n") for text in sources.values()) < 120
    assert too_long({"quickseek.model.long": "\n" * 601}) and too_long({"quickseek.ops.mhc.cute": "\n" * 801})
    assert not too_long({"quickseek.ops.mhc.cute": "\n" * 601})


def test_tests_and_benchmarks_are_no_longer_than_files_of_the_package() -> None:
    texts = {name: text for name, text in written().items() if name.endswith(".py")}
    assert not [name for name, text in texts.items() if text.count("\n") > 600]


def test_every_operation_has_its_folder_and_every_folder_the_same_shape() -> None:
    folders = {path.parent.name for path in (PACKAGE / "ops").glob("*/__init__.py")}
    assert folders == set(OPERATIONS)
    for operation in OPERATIONS:
        files = {path.stem for path in (PACKAGE / "ops" / operation).glob("*.py")}
        assert not misshapen(operation, files), operation
    assert misshapen("mhc", {"__init__", "cute"}) == ["reference"]
    assert misshapen("mhc", {"__init__", "reference", "helpers"}) == ["helpers"]


def undocumented(sources: Sources) -> list[str]:
    """Modules without a docstring, and functions and classes of a door without one."""
    found = []
    for name, text in sources.items():
        tree = parsed(text)
        if not ast.get_docstring(tree):
            found.append(name)
        if name.split(".")[1:2] == ["ops"] and name.count(".") == 2 and name.split(".")[2] in OPERATIONS:
            public = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
            found += [f"{name}.{n.name}" for n in public if not n.name.startswith("_") and not ast.get_docstring(n)]
    return found


def test_every_module_and_everything_at_a_door_says_what_it_is() -> None:
    assert not undocumented(package())
    assert undocumented({"quickseek.model": "x = 1"}) == ["quickseek.model"]
    assert undocumented({"quickseek.ops.mhc": '"""mHC."""\ndef post(x): ...'}) == ["quickseek.ops.mhc.post"]


def talkative(sources: Sources) -> list[str]:
    """Folders, other than those with a door, whose ``__init__`` holds more than its docstring."""
    return [
        name
        for name, text in sources.items()
        if any(other.startswith(f"{name}.") for other in sources)
        and name != "quickseek"
        and not (name.startswith("quickseek.ops.") and name.split(".")[2] in OPERATIONS)
        and len(parsed(text).body) != 1
    ]


def test_a_folder_says_in_one_docstring_what_it_is_for() -> None:
    sources = package()
    assert not talkative(sources)
    assert talkative(sources | {"quickseek.model": '"""The model."""\nfrom quickseek.model import layer'})


def test_the_model_reads_no_environment_and_asks_for_no_device() -> None:
    forbidden = re.compile(r"os\.environ|getenv|\.is_cuda|device\.type|cuda\.is_available")

    def found(sources: Sources) -> list[str]:
        return [name for name, text in sources.items() if ".model" in name and forbidden.search(text)]

    assert not found(package())
    assert found({"quickseek.model.layer": "if x.is_cuda:"}) and found({"quickseek.model": "os.environ['A']"})


def test_tests_mirror_the_package_and_have_names_of_their_own() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {path.name for path in PACKAGE.iterdir() if path.is_dir()} | TEST_FOLDERS_BESIDE_SRC
    operations = {path.name for path in (ROOT / "tests" / "ops").iterdir() if path.is_dir()} - {"__pycache__"}
    assert operations <= set(OPERATIONS)
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)) > 50


# ---------------------------------------------------------------------------------------------- what may not be there


def test_nothing_names_a_path_of_one_machine() -> None:
    assert not [name for name, text in written().items() if MACHINE_PATH.search(text)]
    for planted in ("work", "home", "tmp"):
        assert MACHINE_PATH.search(f'open("/{planted}/somewhere")')
    assert not MACHINE_PATH.search("https://example.org/home/page") and not MACHINE_PATH.search("tests/work/x")


def test_nothing_is_left_unfinished_without_an_error_of_its_own() -> None:
    texts = {name: text for name, text in written().items() if name.endswith((".py", ".md"))}
    assert not [name for name, text in texts.items() if UNFINISHED.search(text)]
    assert UNFINISHED.search("# TO" + "DO: later")


def test_a_number_that_is_written_twice_is_the_same() -> None:
    """The configuration and the policy load no torch, so they repeat two numbers of modules that do."""
    assert config_checks.BLOCK == formats.BLOCK
    assert blocks.SCRATCH == cache_op.SCRATCH


# ---------------------------------------------------------------------------------------------- pages


def dangling(page: str, text: str) -> list[str]:
    """Links of a page to files that are not there, and benchmarks, tests and modules that it names in vain."""
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`(?:python )?((?:benchmarks|tests)/[\w./-]+|(?:engine|model|ops|tokenizer)/\w+\.py)", text)
    missing = [link for link in links if not (folder / link).exists()]
    return missing + [name for name in named if not ((ROOT / name).exists() or (PACKAGE / name).exists())]


def test_pages_name_what_is_there() -> None:
    pages = {name: text for name, text in written().items() if name == "README.md" or name.startswith("docs/")}
    assert len(pages) > 3 and not {name: found for name, text in pages.items() if (found := dangling(name, text))}
    for planted in ("[x](gone.md)", "`python benchmarks/gone.py`", "`engine/gone.py`"):
        assert dangling("docs/page.md", planted)


def test_every_benchmark_is_listed_with_its_question() -> None:
    page = written()["docs/testing.md"]
    # Cases of operations (ops_linear.py and so on, in the form of op_case.py) are run by ops.py, and step.py draws with
    # timeline.py.
    parts = ("ops_", "op_case", "timeline")
    names = [p.name for p in (ROOT / "benchmarks").glob("*.py") if not p.name.startswith(parts)]
    assert names and not [name for name in names if f"benchmarks/{name}" not in page]


def absent_imports(sources: Sources) -> list[str]:
    """Imports of the package's modules, in any Python file, that name a module or a thing of it that is not there."""
    modules, found = package(), []
    words = {name: set(re.findall(r"\w+", text)) for name, text in modules.items()}
    for path, text in sources.items():
        for node in import_statements(text, True):
            if isinstance(node, ast.Import) or not (node.module or "").startswith("quickseek"):
                continue
            module = node.module or ""
            if module not in modules:
                found.append(f"{path} imports {module}")
                continue
            found += [
                f"{path} imports {alias.name} from {module}"
                for alias in node.names
                if f"{module}.{alias.name}" not in modules and alias.name not in words[module]
            ]
    return found


def test_every_import_of_ours_names_what_is_there() -> None:
    """Also where no test runs the file: benchmarks, and tests that need a GPU."""
    files = {path: text for path, text in written().items() if path.endswith(".py")}
    assert absent_imports(files) == []
    planted = {
        "benchmarks/a.py": "from quickseek.ops.nowhere import thing",
        "b.py": "from quickseek.errors import Nothing",
    }
    assert len(absent_imports(planted)) == 2
