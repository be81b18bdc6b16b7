"""The shape of the source: what may import what, what nothing may import, how large things get.

Reads the source as text and syntax trees. Knows nothing of what the code does.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import w5xde

PACKAGE = Path(w5xde.__file__).parent
# What a reader can take in at one sitting: a module, a class, a call that makes an object, a folder.
LINES_MAX = 400
CLASS_CODE_LINES_MAX = 250
CONSTRUCTOR_PARAMETERS_MAX = 6
FOLDER_MODULES_MAX = 14

# The layers. Each may import from itself and from those named; the three siblings in the middle
# (protocol, control, learn) never import one another.
EDGES = {
    "cli",
    "follow",
    "api",
    "demo",
    "__main__",
    "datasets",
    "launch",
    "dashboard",
    "chaos",
    "bench",
    "deploy",
    "doctor",
    "engines",
    "frameworks",
    "page",
    "pool",
}
BASE = {
    "errors",
    "messages",
    "config",
    "setting_sources",
    "compression",
    "specs",
    "message_types",
    "runs",
    "tree",
    "callbacks",
    "sanitize",
    "explanations",
    "ticket",
}
RUNTIME = {"runtime", "protocol", "control", "learn"} | BASE
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(EDGES, EDGES | RUNTIME),
    "runtime": RUNTIME,
    "protocol": {"protocol", "errors", "messages", "message_types", "sanitize"},
    "control": {"control", "tree", "specs"},
    "learn": {"learn"} | BASE,
    **dict.fromkeys(BASE, BASE),
}
# The rooms (packages) of a layer, lowest row first. A room may import rooms of lower rows alone. Modules
# that lie in a layer itself (control.events, control.coordinator) are free.
ROOMS: dict[str, list[set[str]]] = {
    "control": [{"pool"}, {"steps"}, {"modes"}, {"trust"}, {"audit"}],
    "learn": [
        {"model", "rate"},
        {"codecs", "data"},
        {"train"},
        {"step"},
        {"rounds"},
        {"trust"},
        {"calls"},
        {"job"},
    ],
    "runtime": [
        {"system"},
        {"net", "durable"},
        {"admission"},
        {"telemetry"},
        {"pipeline"},
        {"node", "evaluation"},
        {"coordinator"},
        {"calls"},
    ],
}
# Modules that every room of their layer may import, because they define a noun that all of them share.
SHARED = {"w5xde.learn.job.job", "w5xde.learn.job.pool_job"}
# (importing module, imported module): why the arrow points up.
UPWARD_IMPORTS = {
    ("w5xde.control.steps.tally", "w5xde.control.trust.quorum"): "the tally notes steps without a quorum",
}
# Public types that name tensors import torch for type checkers alone.
MAY_NAME_TENSORS = {"callbacks"}
# Edges that start only when training does may load torch at once; the others load it inside functions.
LOAD_TORCH = {"learn", "runtime", "demo", "bench", "frameworks"}
IMPURE = {
    "torch", "numpy", "safetensors", "asyncio", "socket", "selectors", "threading", "multiprocessing",
    "concurrent", "subprocess", "signal", "time", "datetime",
}  # fmt: skip
# The first system's way to serialise exists in a benchmark alone, to be compared with.
MAY_PICKLE = {"w5xde.bench.suites.pickled"}
DANGEROUS = {
    "pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "ctypes", "cffi",
    "code", "codeop", "runpy",
}  # fmt: skip
# Modules that import by a name, or look for a module: the package for its own parts, the job for its file and
# for what that imports, benchmarks for their contestants.
MAY_IMPORT_BY_NAME = {
    "w5xde",
    "w5xde.learn.job.job",
    "w5xde.learn.job.code.packages",
    "w5xde.bench.contestants.ray_actors",
    "w5xde.bench.command",
}
# Builtins that turn text into code.
EXECUTING = {"eval", "exec", "compile", "__import__"}
# Modules that read messages of peers, or files: no name in these may become the name of an attribute.
READERS = (
    "w5xde.protocol",
    "w5xde.messages",
    "w5xde.runs",
    "w5xde.compression",
    "w5xde.learn.codecs",
    "w5xde.learn.data.payload",
    "w5xde.learn.data.samples",
    "w5xde.learn.model.layout",
    "w5xde.learn.step.checkpoint",
    "w5xde.learn.job.code.bundle",
    "w5xde.learn.job.node_setup",
    "w5xde.learn.job.code.origin",
    "w5xde.follow",
    "w5xde.page",
    "w5xde.runtime.durable.audit",
    "w5xde.runtime.durable.disk",
    "w5xde.runtime.evaluation.export",
    "w5xde.runtime.pipeline.updates",
    "w5xde.runtime.durable.ledger",
    "w5xde.runtime.durable.ledger_segments",
    "w5xde.runtime.durable.lock",
    "w5xde.runtime.node.body",
    "w5xde.runtime.node.code_request",
    "w5xde.runtime.node.consent",
    "w5xde.runtime.node.executor",
    "w5xde.runtime.node.limits",
    "w5xde.runtime.node.listed_batches",
    "w5xde.runtime.node.sample_cache",
    "w5xde.runtime.coordinator.peers",
    "w5xde.runtime.durable.resume",
    "w5xde.runtime.durable.sealed_json",
    "w5xde.runtime.durable.step_log",
    "w5xde.runtime.durable.checkpoints",
    "w5xde.runtime.net.connection",
    "w5xde.runtime.node.worker",
    "w5xde.control",
    "w5xde.runtime.admission.register",
    "w5xde.runtime.admission.credentials",
    "w5xde.runtime.admission.node_pass",
    "w5xde.runtime.admission.private_files",
    "w5xde.runtime.admission.gatekeeper",
    "w5xde.runtime.admission.bans",
    "w5xde.runtime.admission.accepted_code",
    "w5xde.runtime.admission.code_offers",
    "w5xde.runtime.admission.reception",
    "w5xde.runtime.net.listener",
    "w5xde.runtime.net.dialer",
    "w5xde.runtime.pipeline.peer",
)


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing its importer imports it too."""

    line: int
    module: str
    at_once: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def home(self) -> str:
        return self.module.split(".")[1] if "." in self.module else ""


@dataclass(frozen=True)
class Module:
    path: Path
    name: str
    tree: ast.Module
    text: str

    @property
    def home(self) -> str:
        """Its layer: that of `w5xde.learn.data.sources` is `learn`; the package itself has none."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def room(self) -> str:
        """The package inside its layer: that of `w5xde.learn.data.sources` is `data`."""
        return room_of(self.name)

    def imports(self) -> Iterator[Import]:
        yield from _imports(self.tree.body, at_once=True)

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(PACKAGE.parent)}:{line}"


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[2] if len(parts) > 3 else ""


def _imports(body: list[ast.stmt], *, at_once: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, at_once)
            case ast.ImportFrom():
                assert node.level == 0, f"a relative import in line {node.lineno}"
                for alias in node.names:
                    yield Import(node.lineno, f"{node.module}.{alias.name}", at_once)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _imports(node.body, at_once=False)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(node.body, at_once=False)
                yield from _imports(node.orelse, at_once=at_once)
            case _:
                for inner in ast.iter_child_nodes(node):
                    if isinstance(inner, ast.stmt):
                        yield from _imports([inner], at_once=at_once)
                    elif isinstance(inner, (ast.ExceptHandler, ast.match_case)):
                        yield from _imports(inner.body, at_once=at_once)


def _load(path: Path) -> Module:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    text = path.read_text(encoding="utf-8")
    return Module(path, ".".join(parts).removesuffix(".__init__"), ast.parse(text), text)


MODULES = [_load(path) for path in sorted(PACKAGE.rglob("*.py"))]


def on(*homes: str) -> Iterator[Module]:
    return (module for module in MODULES if module.home in homes)


def every_node() -> Iterator[tuple[Module, ast.AST]]:
    return ((module, node) for module in MODULES for node in ast.walk(module.tree))


def test_every_module_has_a_layer():
    assert {module.home for module in MODULES} <= {*MAY_IMPORT, ""}
    assert len(MODULES) > 30


# --- arrows ---------------------------------------------------------------------------------------


def test_arrows_point_down():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in on(*MAY_IMPORT)
        for found in module.imports()
        if found.top == "w5xde" and found.home and found.home not in MAY_IMPORT[module.home]
    ] == []


def _levels() -> dict[tuple[str, str], int]:
    return {
        (layer, room): level
        for layer, rows in ROOMS.items()
        for level, row in enumerate(rows)
        for room in row
    }


def test_every_room_has_a_level():
    found = {(module.home, module.room) for module in on(*ROOMS) if module.room}
    assert found == set(_levels())


def test_rooms_import_downwards_only():
    levels = _levels()
    upward = set()
    for module in on(*ROOMS):
        for found in module.imports():
            # `found.module` names what is imported from a module; the module itself is its parent.
            room, imported = room_of(found.module), found.module.rpartition(".")[0]
            if not module.room or room == module.room or imported in SHARED:
                continue
            if found.home != module.home or (module.home, room) not in levels:
                continue
            if levels[module.home, room] >= levels[module.home, module.room]:
                upward.add((module.name, imported))
    assert sorted(upward - set(UPWARD_IMPORTS)) == []
    assert sorted(set(UPWARD_IMPORTS) - upward) == [], "no longer needed: take it out of UPWARD_IMPORTS"


def test_the_package_itself_imports_nothing_of_its_own_at_once():
    [package] = on("")
    assert [found.module for found in package.imports() if found.at_once and found.top == "w5xde"] == []


def test_modules_use_only_the_version_of_the_package_itself():
    for module, node in every_node():
        match node:
            case ast.Attribute(value=ast.Name(id="w5xde"), attr=name):
                assert name == "__version__", module.at(node.lineno)


def test_there_is_no_circle_of_imports():
    known = {module.name for module in MODULES if module.home}
    arrows = {
        module.name: {
            name
            for found in module.imports()
            for name in (found.module, found.module.rpartition(".")[0])
            if found.at_once and name in known
        }
        for module in MODULES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path, name))
        if name not in done:
            for below in arrows[name]:
                visit(below, (*path, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


# --- what each floor may know ---------------------------------------------------------------------


def names_tensors(module: Module, found: Import) -> bool:
    return module.home in MAY_NAME_TENSORS and found.module == "torch.Tensor" and not found.at_once


def test_what_is_pure_knows_no_tensors_sockets_threads_or_clock():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in on("protocol", "control", *BASE)
        for found in module.imports()
        if found.top in IMPURE and not names_tensors(module, found)
    ] == []


def test_decisions_use_the_standard_library_alone():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in on("control")
        for found in module.imports()
        if found.top != "w5xde" and found.top not in sys.stdlib_module_names
    ] == []


def test_the_protocol_and_the_base_use_msgspec_and_nothing_else_from_outside():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in on("protocol", *BASE)
        for found in module.imports()
        if found.top not in {"w5xde", "msgspec"} and found.top not in sys.stdlib_module_names
        if not names_tensors(module, found)
    ] == []


def test_arithmetic_knows_no_sockets_or_threads():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in on("learn")
        for found in module.imports()
        if found.top in {"asyncio", "socket", "selectors", "threading", "subprocess", "signal"}
    ] == []


def test_torch_is_loaded_at_once_only_where_training_happens():
    assert [
        f"{module.at(found.line)} loads {found.module}"
        for module in MODULES
        for found in module.imports()
        if found.top in {"torch", "numpy", "safetensors"} and found.at_once and module.home not in LOAD_TORCH
    ] == []


def test_decisions_draw_only_from_a_generator_that_was_handed_in():
    for module in on("control"):
        for found in module.imports():
            assert found.top not in {"secrets", "uuid"}, module.at(found.line)
            assert found.top != "random" or found.module == "random", module.at(found.line)
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="random"), attr=name)):
                    pytest.fail(f"{module.at(node.lineno)} calls random.{name}")
                case ast.Attribute(value=ast.Name(id="random"), attr=name):
                    assert name == "Random", module.at(node.lineno)


# --- what may be used nowhere ---------------------------------------------------------------------


def test_nothing_that_could_execute_what_it_reads_is_imported():
    assert [
        f"{module.at(found.line)} imports {found.module}"
        for module in MODULES
        for found in module.imports()
        if (found.top in DANGEROUS or found.module == "torch.load")
        and not (found.top == "pickle" and module.name in MAY_PICKLE)
    ] == []


def test_the_benchmark_alone_can_reach_what_pickles():
    assert {module.name for module in MODULES if "pickle" in {found.top for found in module.imports()}} == (
        MAY_PICKLE
    )
    assert {
        module.name
        for module in MODULES
        for found in module.imports()
        if found.module.startswith("w5xde.bench.suites.pickled")
    } == {"w5xde.bench.suites.evolution"}
    # And only the command reaches the benchmark.
    assert {
        module.name for module in MODULES if module.home != "bench"
        for found in module.imports() if found.home == "bench"
    } == {"w5xde.cli.main"}  # fmt: skip


def test_the_product_never_loads_what_pickles():
    # Without modules that run when they are imported, and those that need Ray, which `make engines` installs.
    product = [
        m.name
        for m in MODULES
        if m.home != "bench"
        and not m.name.endswith("__main__")
        and "ray" not in {found.top for found in m.imports()}
        and not any(found.module.startswith("w5xde.engines.ray") for found in m.imports())
    ]
    code = f"import sys, importlib\nfor name in {product}:\n    importlib.import_module(name)\n"
    code += "sys.exit(any(name.startswith('w5xde.bench') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


def test_the_page_is_a_process_of_its_own():
    # Whatever trains may start it, and imports nothing of it.
    assert {
        (module.home, found.module)
        for module in MODULES if module.home not in {"page", "follow"}
        for found in module.imports() if found.home == "page"
    } == {
        ("cli", "w5xde.page.command.run_show"),
        ("api", "w5xde.page.child.start_page_of_loop"),
        ("chaos", "w5xde.page.child.start_page"),
    }  # fmt: skip
    homes = RUNTIME | {"follow", "api", "demo", "chaos", "cli", "pool"}
    training = [m.name for m in MODULES if m.home in homes and not m.name.endswith("__main__")]
    code = f"import sys, importlib\nfor name in {training}:\n    importlib.import_module(name)\n"
    code += "sys.exit(any(name in sys.modules for name in ('starlette', 'uvicorn', 'w5xde.page.app')))"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


def executing(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where text or a pickle could become code: also under another name, as in `run = eval`."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in EXECUTING:
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="builtins"), attr=name):
                yield node.lineno, f"builtins.{name}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "hub" | "package" as name):
                yield node.lineno, f"torch.{name}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"), attr=part):
                # Torch's own kernels are nothing that is loaded; all else there may be.
                if part != "aten":
                    yield node.lineno, f"torch.ops.{part}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr=part), attr="load"):
                yield node.lineno, f"torch.{part}.load"


def named_by_data(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where an attribute's name is not written down in the program."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr" | "hasattr" as name), args=args):
                if len(args) < 2 or not isinstance(args[1], ast.Constant):
                    yield node.lineno, name
            case ast.Attribute(attr="__dict__" | "__setattr__" | "__getattribute__" | "__globals__" as name):
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="attrgetter" | "methodcaller" as name)):
                yield node.lineno, name


def asserting(tree: ast.AST) -> Iterator[tuple[int, str]]:
    return ((node.lineno, "assert") for node in ast.walk(tree) if isinstance(node, ast.Assert))


Rule = Callable[[ast.AST], Iterator[tuple[int, str]]]


def broken(rule: Rule, modules: Iterable[Module]) -> list[str]:
    return [f"{module.at(line)} uses {what}" for module in modules for line, what in rule(module.tree)]


def test_nothing_that_could_execute_what_it_reads_is_used():
    assert broken(executing, MODULES) == []


def test_modules_are_imported_by_name_only_for_the_users_own_job():
    assert {
        module.name for module in MODULES for found in module.imports() if found.top == "importlib"
    } == MAY_IMPORT_BY_NAME


def test_no_name_that_a_peer_or_a_file_says_becomes_an_attribute():
    readers = [module for module in MODULES if f"{module.name}.".startswith(tuple(f"{n}." for n in READERS))]
    assert {f"{name}." for name in READERS} == {
        f"{name}." for name in READERS for module in readers if f"{module.name}.".startswith(f"{name}.")
    }
    assert broken(named_by_data, readers) == []


def test_no_check_vanishes_under_python_o():
    assert broken(asserting, MODULES) == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (executing, "eval('1')"),
        (executing, "run = exec"),
        (executing, "compile('1', '', 'eval')"),
        (executing, "__import__('os')"),
        (executing, "builtins.eval('1')"),
        (executing, "torch.load('x')"),
        (executing, "torch.jit.load('x')"),
        (executing, "torch.hub.load('x', 'y')"),
        (executing, "torch.ops.load_library('x')"),
        (named_by_data, "getattr(torch, message.dtype)"),
        (named_by_data, "setattr(thing, key, value)"),
        (named_by_data, "hasattr(thing, f'{key}')"),
        (named_by_data, "thing.__dict__.update(state)"),
        (named_by_data, "operator.attrgetter(name)(thing)"),
        (asserting, "def check():\n    assert True"),
    ],
)
def test_the_rules_see_what_they_are_for(rule, code):
    assert list(rule(ast.parse(code)))


def test_the_rules_let_pass_what_is_meant():
    harmless = ast.parse("getattr(mmap, 'MADV', None)\nre.compile('x')\nmodel.eval()\nmsgspec.json.decode(x)")
    assert not [*executing(harmless), *named_by_data(harmless), *asserting(harmless)]


def test_arrays_are_read_from_files_only_with_pickling_refused():
    for module, node in every_node():
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"), keywords=given):
                allowed = {keyword.arg: ast.unparse(keyword.value) for keyword in given}
                assert allowed.get("allow_pickle") == "False", module.at(node.lineno)
            case ast.keyword(arg="allow_pickle", value=value):
                assert ast.unparse(value) == "False", module.at(value.lineno)


# --- shape ----------------------------------------------------------------------------------------


def test_every_module_begins_by_saying_what_it_is():
    assert [module.name for module in MODULES if not ast.get_docstring(module.tree)] == []


def test_every_module_is_short_enough_to_be_read():
    lengths = {module.name: len(module.text.splitlines()) for module in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(module: Module) -> set[int]:
    """The numbers of the lines that hold code: not blank, no comment, no docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def test_every_class_is_short_enough_to_be_read():
    long = {}
    for module in MODULES:
        code = code_lines(module)
        for node in module.classes():
            lines = sum(node.lineno <= line <= (node.end_lineno or 0) for line in code)
            if lines > CLASS_CODE_LINES_MAX:
                long[f"{module.name}.{node.name}"] = lines
    assert long == {}


def test_no_constructor_takes_more_than_a_caller_can_keep_in_mind():
    found = {}
    for module in MODULES:
        for node in module.classes():
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                    if count > CONSTRUCTOR_PARAMETERS_MAX:
                        found[f"{module.name}.{node.name}"] = count
    assert found == {}


def test_no_class_name_exists_twice():
    homes = defaultdict(list)
    for module in MODULES:
        for node in module.classes():
            homes[node.name].append(module.name)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_folder_is_a_long_flat_list():
    counts = Counter(
        module.path.parent.relative_to(PACKAGE).as_posix()
        for module in MODULES
        if module.path.name != "__init__.py"
    )
    assert {folder: count for folder, count in counts.items() if count > FOLDER_MODULES_MAX} == {}


# --- light ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imported", ["w5xde", "w5xde.cli.main", "w5xde.api", "w5xde.datasets", "w5xde.protocol.wire"]
)
def test_importing_it_loads_neither_torch_nor_numpy(imported):
    code = f"import sys, {imported}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["train"], ["bench"], ["bench", "seed"], ["bench", "peers"], ["deploy"]])
def test_help_loads_no_torch(words):
    code = (
        "import sys, contextlib\nfrom w5xde.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({[*words, '--help']})\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)


# --- tests use public names -------------------------------------------------------------------------

TESTS = Path(__file__).parent
# A test that looks inside breaks when the inside is rewritten; these few have no other way to see what they
# are about. The number may only fall.
PRIVATE_ACCESSES_MAX = 20
# Public names of the standard library that begin with an underscore.
PUBLIC_UNDERSCORES = {"_exit", "_replace"}
# It says when torch changes one of the private names that w5xde uses, so it must use them itself.
ABOUT_PRIVATE_NAMES = TESTS / "learn" / "test_torch_private.py"


def private_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield where code uses a private name of something else than its own object, class or base class."""

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.endswith("__") and name not in PUBLIC_UNDERSCORES

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, alias.name) for alias in names if is_private(alias.name))


def test_tests_hardly_ever_use_private_names():
    found = [
        f"{path.relative_to(TESTS)}:{line} {what}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != ABOUT_PRIVATE_NAMES
        for line, what in private_accesses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) <= PRIVATE_ACCESSES_MAX, "\n".join(found)


def test_private_names_are_recognised():
    seen = ast.parse("peer._work\nself.peer._work\nfrom w5xde.ticket import _to_base32")
    assert len(list(private_accesses(seen))) == 3
    own = ast.parse(
        "self._work\ncls._work\nsuper()._work()\nos._exit(0)\nrow._replace(a=1)\nfrom x import __doc__"
    )
    assert list(private_accesses(own)) == []


# --- one driver of the core -------------------------------------------------------------------------

# The simulator drives the core through the real pipeline; all other tests share one driver.
MAY_DRIVE = {"control/driver.py", "sim/coordinator.py"}


def drives_core(tree: ast.AST) -> bool:
    """Whether code makes a coordinator's core, or derives a class from it."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(ast.unparse(name).split(".")[-1] == "CoordinatorCore" for name in called + bases)


def test_only_the_driver_and_the_simulator_construct_the_core():
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if drives_core(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == MAY_DRIVE


def test_a_driver_of_the_core_is_recognised():
    for code in ("CoordinatorCore(plan)", "c.CoordinatorCore(plan)", "class A(B, CoordinatorCore): ..."):
        assert drives_core(ast.parse(code))
    assert not drives_core(ast.parse("def check(core: CoordinatorCore): core.view"))
