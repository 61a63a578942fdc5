"""Whatever is public says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.files import name, package_trees

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_public(node: ast.stmt) -> bool:
    return isinstance(node, Definition) and not node.name.startswith("_")


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def methods(node: ast.ClassDef) -> Iterator[Definition]:
    """Public methods; one that only sets a property, or only types another, has its description elsewhere."""
    for item in node.body:
        if isinstance(item, Definition) and is_public(item):
            decorators = [ast.unparse(d) for d in item.decorator_list]
            if not any(d.endswith((".setter", "overload")) for d in decorators):
                yield item


def undocumented(tree: ast.Module, documented: dict[str, set[str]]) -> Iterator[str]:
    """Names without a docstring. documented: class -> methods with one, for those that override them."""
    for node in filter(is_public, tree.body):
        assert isinstance(node, Definition)
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef) and "Protocol" not in base_names(node):
            inherited = set().union(*(documented.get(base, set()) for base in base_names(node)))
            for method in methods(node):
                if not ast.get_docstring(method) and method.name not in inherited:
                    yield f"{node.name}.{method.name}"


def test_public_functions_classes_and_modules_have_docstrings() -> None:
    classes = [node for _, tree in package_trees() for node in tree.body if isinstance(node, ast.ClassDef)]
    documented = {node.name: {m.name for m in methods(node) if ast.get_docstring(m)} for node in classes}
    for _ in range(4):  # what a class overrides may be documented further up
        for node in classes:
            documented[node.name].update(*(documented.get(base, set()) for base in base_names(node)))
    missing = []
    for path, tree in package_trees():
        if tree.body and not ast.get_docstring(tree):
            missing.append(name(path))
        missing += [f"{name(path)}: {what}" for what in undocumented(tree, documented)]
    assert missing == []
