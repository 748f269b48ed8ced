"""Fields of classes in installed packages, read from their sources.

The sources are parsed, not imported: an import would take longer than the whole check.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError, nearest
from megatron_rl.user_code import find_module

_SIMPLE: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "List": (list,),
    "tuple": (list,),
    "Tuple": (list,),
    "set": (list,),
    "dict": (dict,),
    "Dict": (dict,),
}


@dataclass(frozen=True)
class InstalledField:
    """Hold the annotation of a field and the module that it is written in."""

    name: str
    annotation: ast.expr
    module: str

    def accepts(self, value: Any) -> bool:
        """Return whether a plain value may be of the field's type; true where the type cannot be told."""
        return _accepts(self.annotation, self.module, value)

    def words(self) -> str:
        """Return the annotation as it is written, a name for choices as the choices."""
        if isinstance(self.annotation, ast.Name) and self.annotation.id not in _SIMPLE:
            return ast.unparse(_alias(self.annotation.id, self.module)[0] or self.annotation)
        return ast.unparse(self.annotation)


def class_fields(*classes: tuple[str, str]) -> dict[str, InstalledField] | None:
    """Return the annotated fields of classes, each given as module and name, by field name.

    None where a module is not installed, or another version keeps the class elsewhere.
    """
    fields: dict[str, InstalledField] = {}
    for module, name in classes:
        tree = _tree(module)
        body = next(
            (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None
        )
        if body is None:
            return None
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = InstalledField(node.target.id, node.annotation, module)
    return fields


def table_names(module: str, table: str) -> list[str] | None:
    """Return the names in a module's table, which is written as a dict; None where there is none."""
    written, _ = _alias(table, module)
    if not isinstance(written, ast.Dict):
        return None
    return [str(key.value) for key in written.keys if isinstance(key, ast.Constant)]


def field_error(
    section: str, name: str, value: Any, installed: Mapping[str, InstalledField], owner: str
) -> UserError | None:
    """Return the error of a pass-through value whose name or type ``owner``, a class, does not have."""
    where, got = f"{section}.{name}", f"`{name}: {value}`"
    if name not in installed:
        close = nearest(name, installed)
        return UserError(
            f"{owner} of the installed version has no field `{name}`"
            + (f"; did you mean `{close}`?" if close else ""),
            where=where,
            expected=f"a field of {owner}",
            got=got,
            fix=f"write `{section}.{close}`" if close else "remove it",
        )
    if not installed[name].accepts(value):
        return UserError(
            f"`{where}` has a value of the wrong type",
            where=where,
            expected=installed[name].words(),
            got=got,
            fix=f"correct it, or remove it to have the default of {owner}",
        )
    return None


@functools.cache
def _tree(module: str) -> ast.Module:
    file, missing = find_module(module)
    if missing is not None or file is None or file.suffix != ".py":
        return ast.Module([], [])
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _accepts(annotation: ast.expr, module: str, value: Any) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _accepts(ast.parse(annotation.value, mode="eval").body, module, value)
    if isinstance(annotation, ast.Constant):
        return value is None and annotation.value is None
    if isinstance(annotation, ast.BinOp):
        return _accepts(annotation.left, module, value) or _accepts(annotation.right, module, value)
    if isinstance(annotation, ast.Subscript):
        return _accepts_subscript(annotation, module, value)
    if not isinstance(annotation, ast.Name):
        return True
    kinds = _SIMPLE.get(annotation.id)
    if kinds is not None:
        return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    alias, home = _alias(annotation.id, module)
    return True if alias is None else _accepts(alias, home, value)


def _accepts_subscript(annotation: ast.Subscript, module: str, value: Any) -> bool:
    outer = annotation.value.id if isinstance(annotation.value, ast.Name) else ""
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if outer == "Optional":
        return value is None or _accepts(inner[0], module, value)
    if outer == "Union":
        return any(_accepts(option, module, value) for option in inner)
    if outer == "Literal":
        return any(not isinstance(option, ast.Constant) or option.value == value for option in inner)
    return isinstance(value, _SIMPLE[outer]) if outer in _SIMPLE else True


def _alias(name: str, module: str) -> tuple[ast.expr | None, str]:
    """Return what a name stands for in a module, and the module that says so; None where it is no alias."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            # A call makes something that no annotation says, such as NewType.
            return (None if isinstance(node.value, ast.Call) else node.value), module
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return _alias(imported.name, node.module)
    return None, module
