"""YAML for files that people read and edit: texts of several lines as blocks, keys in the order they were given."""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """A writer of YAML without aliases: an object that is there twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
