"""An extension of griffe, which reads the code for the reference."""

import ast

import griffe


class Exports(griffe.Extension):
    """Makes `b` of `from a import b as b` public, as type checkers do."""

    def on_alias_instance(
        self, *, alias: griffe.Alias, node: ast.AST | griffe.ObjectNode, **_: object
    ) -> None:
        """Look at the import that made an alias."""
        if isinstance(node, ast.ImportFrom) and any(
            name.name == name.asname == alias.name for name in node.names
        ):
            alias.public = True
