"""Fields of classes in installed packages, read from their sources without importing them.

`check` compares names and types of pass-through settings (``rollout.vllm``, ``actor.megatron``) and of
config.json with the classes that will receive them. Importing vLLM, transformers or Megatron takes longer
than all rules together, and a machine that only checks may lack torch.

Megatron also validates its settings in a separate process (`megatron_rl.megatron.trial`), which tests whether
the values fit each other and the model. The comparison here is needed as well: Megatron's dataclasses accept
a value of any type and suggest no field for a misspelled name, and the process does not load vLLM and
transformers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError, nearest
from megatron_rl.user_code import find_module

_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {
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
"""Type in an annotation -> the types of YAML and JSON values that it accepts."""


@dataclass(frozen=True)
class InstalledField:
    """Annotated field of an installed class.

    Attributes:
        name: Name of the field.
        annotation: Syntax tree of its annotation.
        module: Module that contains the annotation, in which its names are looked up.
    """

    name: str
    annotation: ast.expr
    module: str

    def accepts(self, value: Any) -> bool:
        """Return whether the field's type accepts a YAML or JSON value; True if the type is not resolved."""
        return _accepts(self.annotation, self.module, value)

    def annotation_text(self) -> str:
        """Return the source text of the annotation; a name of a Literal is replaced by the Literal."""
        if isinstance(self.annotation, ast.Name) and self.annotation.id not in _PLAIN_TYPES:
            definition, _ = _find_definition(self.annotation.id, self.module)
            return ast.unparse(definition or self.annotation)
        return ast.unparse(self.annotation)


def class_fields(*classes: tuple[str, str]) -> dict[str, InstalledField] | None:
    """Return the annotated fields of classes by field name; each class is (module, name).

    Returns None if a module is not installed or does not define the class, as in another version of the
    package.
    """
    fields: dict[str, InstalledField] = {}
    for module, class_name in classes:
        class_body = None
        for node in _parse_module(module).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                class_body = node.body
                break
        if class_body is None:
            return None

        # Later classes, which inherit from the earlier ones, override their fields.
        for node in class_body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                fields[name] = InstalledField(name, node.annotation, module)
    return fields


def read_dict_keys(module: str, variable: str) -> list[str] | None:
    """Return the keys of the dict literal that a module assigns to ``variable``; None for anything else."""
    definition, _ = _find_definition(variable, module)
    if not isinstance(definition, ast.Dict):
        return None
    return [str(key.value) for key in definition.keys if isinstance(key, ast.Constant)]


def field_error(
    section: str, name: str, value: Any, installed_fields: Mapping[str, InstalledField], class_name: str
) -> UserError | None:
    """Return the error for a pass-through setting that is not a field of a class, or has the wrong type.

    ``section`` is the configuration key of the section with the setting ``name: value``.
    ``installed_fields`` maps names to the fields of the installed class. Returns None for a valid setting.
    """
    key = f"{section}.{name}"
    got = f"`{name}: {value}`"

    # A name that the class does not have.
    field = installed_fields.get(name)
    if field is None:
        suggestion = nearest(name, installed_fields)
        message = f"{class_name} of the installed version has no field `{name}`"
        fix = "remove it"
        if suggestion is not None:
            message += f"; did you mean `{suggestion}`?"
            fix = f"write `{section}.{suggestion}`"
        return UserError(message, where=key, expected=f"a field of {class_name}", got=got, fix=fix)

    # A value of the wrong type.
    if not field.accepts(value):
        return UserError(
            f"`{key}` has a value of the wrong type",
            where=key,
            expected=field.annotation_text(),
            got=got,
            fix=f"correct it, or remove it to have the default of {class_name}",
        )
    return None


@functools.cache
def _parse_module(module: str) -> ast.Module:
    """Return the syntax tree of an installed module; an empty tree if the module cannot be read."""
    file, missing_module = find_module(module)
    if missing_module is not None or file is None or file.suffix != ".py":
        return ast.Module([], [])
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _accepts(annotation: ast.expr, module: str, value: Any) -> bool:
    """Return whether an annotation in ``module`` accepts a YAML or JSON value."""
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):  # a quoted annotation
            return _accepts(ast.parse(annotation.value, mode="eval").body, module, value)
        return value is None and annotation.value is None
    if isinstance(annotation, ast.BinOp):  # A | B
        return _accepts(annotation.left, module, value) or _accepts(annotation.right, module, value)

    if isinstance(annotation, ast.Subscript):
        return _accepts_subscript(annotation, module, value)

    # Anything else, such as `module.Type`, is accepted.
    if not isinstance(annotation, ast.Name):
        return True

    accepted_types = _PLAIN_TYPES.get(annotation.id)
    if accepted_types is not None:
        is_bool = isinstance(value, bool)  # bool is a subclass of int
        return isinstance(value, accepted_types) and (bool in accepted_types or not is_bool)

    # A name that the module defines or imports: follow a Literal or a union, accept a class.
    definition, defining_module = _find_definition(annotation.id, module)
    return definition is None or _accepts(definition, defining_module, value)


def _accepts_subscript(annotation: ast.Subscript, module: str, value: Any) -> bool:
    """Return whether an annotation such as ``Optional[int]`` or ``list[str]`` accepts a YAML or JSON value.

    For lists and dicts, only the type of the container is compared.
    """
    if not isinstance(annotation.value, ast.Name):
        return True
    container = annotation.value.id
    arguments = [annotation.slice]
    if isinstance(annotation.slice, ast.Tuple):
        arguments = annotation.slice.elts

    if container == "Optional":
        return value is None or _accepts(arguments[0], module, value)
    if container == "Union":
        return any(_accepts(argument, module, value) for argument in arguments)
    if container == "Literal":
        return any(not isinstance(choice, ast.Constant) or choice.value == value for choice in arguments)
    return container not in _PLAIN_TYPES or isinstance(value, _PLAIN_TYPES[container])


def _find_definition(name: str, module: str) -> tuple[ast.expr | None, str]:
    """Return the expression that a module assigns to ``name``, and the module that contains the assignment.

    Imports are followed. An unassigned name, or an assigned call such as ``NewType(...)``, gives the
    expression None.
    """
    for node in _parse_module(module).body:
        if isinstance(node, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                if isinstance(node.value, ast.Call):
                    return None, module
                return node.value, module
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find_definition(alias.name, node.module)
    return None, module
