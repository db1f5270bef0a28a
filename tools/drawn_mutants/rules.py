"""Rules by which bugs are drawn: each says what may go wrong at a place of a Python file.

The libraries of this trade (cosmic-ray, mutmut) have no dropped statement, dropped element, swapped arguments, axis or
wrong variable, which are the usual bugs of numerical code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Position = ast.expr | ast.stmt | ast.keyword


@dataclass(frozen=True, slots=True)
class Edit:
    """Bug at one place."""

    rule: str
    line: int
    """Line of the place, from 1."""
    begin: int
    """First byte that is replaced."""
    end: int
    text: str
    """What stands there then."""

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.begin] + self.text.encode() + raw[self.end :]).decode()


FLIPPED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
SYMMETRIC = {"min", "max", "minimum", "maximum", "equal", "isclose", "allclose", "promote_types"}
"""Functions that do not tell their arguments apart."""
GENERIC = {"Callable", "Literal", "Mapping", "Sequence", "dict", "frozenset", "list", "set", "tuple", "type"}
"""Names whose subscript is a type."""
LARGE = 32
"""From here on a whole number is a size, a limit or a code: nobody is off by one, and nobody would notice."""
AXES = ("dim", "axis")


def find_edits(source: str) -> list[Edit]:
    """Return every bug that the rules know in a file, in the order of its places. A few are no Python."""
    tree, places = ast.parse(source), Places(source)
    found = [edit for node in list_code(tree) for edit in edit_node(node, places)]
    return sorted({*found, *find_wrong_names(tree, places)}, key=lambda e: (e.begin, e.end, e.rule, e.text))


class Places:
    """Bytes of a file, by its syntax tree."""

    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Position) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Position) -> str:
        begin, end = self.span(node)
        return self.raw[begin:end].decode()

    def replace(self, rule: str, node: Position, text: str) -> Edit:
        return Edit(rule, node.lineno, *self.span(node), text)

    def between(self, rule: str, left: Position, right: Position, old: str, new: str) -> Iterator[Edit]:
        """Yield the edit of an operator between two operands, unless brackets or comments hide it."""
        begin, end = self.span(left)[1], self.span(right)[0]
        if self.raw[begin:end].decode().split() == old.split():
            yield Edit(rule, left.end_lineno or left.lineno, begin, end, f" {new} ")

    def drop_item(self, rule: str, items: list[Position], at: int) -> Edit:
        """Return the edit that drops one of several items with the comma beside it."""
        begin, end = self.span(items[at])
        if at + 1 < len(items):
            end = self.span(items[at + 1])[0]
        elif at:
            begin = self.span(items[at - 1])[1]
        return Edit(rule, items[at].lineno, begin, end, "")


def list_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no types, docstrings, decorators, imports, guards, or sentences of errors."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.arg() | ast.JoinedStr() | ast.Assert():
                continue
            case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.keyword(arg=str(name)) if name in _NEEDED:
                continue
            case ast.Subscript(value=ast.Name(id=str(name))) if name in GENERIC:
                continue
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                continue  # read by a star import only
            case ast.Raise():
                yield node  # the statement, not its sentence
                continue
            case ast.BinOp() if is_number(node):
                yield node  # one number, such as 2**20, and not two
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield from (deep for part in node.body for deep in list_under(part))
            case ast.AnnAssign(value=value):
                yield node
                if value is not None:
                    yield from list_under(value)
            case _:
                yield node
                yield from list_code(node)


def is_number(node: ast.AST) -> bool:
    """Return whether an expression computes one number of others."""
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def list_under(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's code, itself included."""
    return list_code(ast.Module(body=[node], type_ignores=[]))  # type: ignore[list-item]


def edit_node(node: ast.AST, at: Places) -> Iterator[Edit]:
    for rule in (compare, negate, combine, calculate, change_constant, drop_statement, change_call, drop_element):
        yield from rule(node, at)


def compare(node: ast.AST, at: Places) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for (left, right), op in zip(pairwise(operands), node.ops, strict=True):
            old = _OLD[type(op)]
            for new in FLIPPED[type(op)]:
                yield from at.between("comparison", left, right, old, new)


def negate(node: ast.AST, at: Places) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield at.replace("dropped not", node, f"bool({at.text(node.operand)})")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield at.replace("sign", node, at.text(node.operand))
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield at.replace("condition", node.test, f"(not ({at.text(node.test)}))")


def combine(node: ast.AST, at: Places) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            yield from at.between("and, or", left, right, old, new)


def calculate(node: ast.AST, at: Places) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        old, new = OPERATORS[type(node.op)]
        yield from at.between("operator", node.left, node.right, old, new)
        if isinstance(node.op, ast.Sub | ast.Div):
            left, right = at.text(node.left), at.text(node.right)
            yield at.replace("swapped operands", node, f"({right}) {old} ({left})")
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        old, new = OPERATORS[type(node.op)]
        yield from at.between("operator", node.target, node.value, f"{old}=", f"{new}=")


def change_constant(node: ast.AST, at: Places) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=bool(value)):
            yield at.replace("constant", node, str(not value))
        case ast.Constant(value=int(value)) if value >= LARGE:
            yield at.replace("constant", node, str(value * 2 + 1))
        case ast.Constant(value=int(value)):
            yield at.replace("off by one", node, str(value + 1))
            if value > 0:
                yield at.replace("off by one", node, str(value - 1))
        case ast.Constant(value=float(value)):
            yield at.replace("constant", node, repr(value * 2 + 1))
        case ast.BinOp() if is_number(node):
            yield at.replace("constant", node, f"({at.text(node)}) * 2 + 1")
        case _:
            pass


def drop_statement(node: ast.AST, at: Places) -> Iterator[Edit]:
    match node:
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield at.replace("dropped statement", node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield at.replace("dropped statement", node, "pass")
        case ast.Continue() | ast.Break():
            yield at.replace("dropped statement", node, "pass")
        case _:
            pass


def change_call(node: ast.AST, at: Places) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    if not any(isinstance(arg, ast.Starred) for arg in node.args):
        for left, right in pairwise(node.args):
            begin, end = at.span(left)[0], at.span(right)[1]
            middle = at.raw[at.span(left)[1] : at.span(right)[0]].decode()
            same = at.text(left) == at.text(right) or at.text(node.func).rpartition(".")[2] in SYMMETRIC
            if not same and "(" not in middle and ")" not in middle:
                text = f"{at.text(right)}{middle}{at.text(left)}"
                yield Edit("swapped arguments", left.lineno, begin, end, text)
    items: list[Position] = [*node.args, *node.keywords]
    for n, keyword in enumerate(items):
        if isinstance(keyword, ast.keyword) and keyword.arg is not None and keyword.arg not in _NEEDED:
            yield at.drop_item("dropped argument", items, n)
        if isinstance(keyword, ast.keyword) and keyword.arg in AXES and isinstance(keyword.value, ast.Constant):
            yield at.replace("axis", keyword.value, "-1" if keyword.value.value == 0 else "0")


def drop_element(node: ast.AST, at: Places) -> Iterator[Edit]:
    if isinstance(node, ast.List | ast.Set | ast.Tuple) and isinstance(getattr(node, "ctx", None), ast.Load | None):
        # one item less must leave a set or a tuple as it is written
        least = {ast.List: 0, ast.Set: 1, ast.Tuple: 2}[type(node)]
        items: list[Position] = [*node.elts]
        for n in range(len(items) if len(items) > least else 0):
            yield at.drop_item("dropped element", items, n)
    if isinstance(node, ast.Dict) and len(node.keys) > 1 and None not in node.keys:
        for n, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            assert key is not None
            begin, end = at.span(key)[0], at.span(value)[1]
            if n + 1 < len(node.keys):
                following = node.keys[n + 1]
                assert following is not None
                end = at.span(following)[0]
            else:
                begin = at.span(node.values[n - 1])[1]
            yield Edit("dropped element", key.lineno, begin, end, "")


def find_wrong_names(tree: ast.AST, at: Places) -> Iterator[Edit]:
    """Yield the use of one parameter in place of another of the same annotation."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        alike: dict[str, list[str]] = {}
        for arg in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            if arg.annotation is not None:
                alike.setdefault(ast.dump(arg.annotation), []).append(arg.arg)
        others = {name: names for names in alike.values() if len(names) > 1 for name in names}
        for part in function.body:
            for node in list_under(part):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in others:
                    names = others[node.id]
                    yield at.replace("wrong variable", node, names[names.index(node.id) - 1])


_OLD: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_NEEDED = ("strict",)
"""Arguments that only guard: without a mistake elsewhere nobody can tell the difference."""
