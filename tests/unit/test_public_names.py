"""What `import gptworks` offers, before and after its packages have been imported."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import gptworks
from gptworks.callable_package import CallablePackage


def test_every_public_name_is_there() -> None:
    for name in gptworks.__all__:
        assert getattr(gptworks, name) is not None


def test_functions_stay_callable_when_their_packages_are_imported() -> None:
    import gptworks.evaluate.heldout
    import gptworks.generate.engine
    import gptworks.train.loop

    for _ in range(2):
        with pytest.raises(gptworks.GPTWorksError, match=r"run\.out: not set"):
            gptworks.train(gptworks.load_config(preset="tiny"))
        with pytest.raises(gptworks.GPTWorksError, match="has no tokenizer"):
            gptworks.generate(gptworks.GPT(gptworks.load_config(preset="tiny-4k").model), "Hello")
        with pytest.raises(gptworks.GPTWorksError, match="no task 'bleu'"):
            gptworks.evaluate("runs/none", "data/none", task="bleu")


def test_every_public_name_is_in_the_list_for_editors() -> None:
    """What a type checker sees is written by hand beside what is resolved when first used."""
    tree = ast.parse(Path(gptworks.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) | {"__version__"} == set(gptworks.__all__)
    for name, (module, attribute) in seen.items():
        found = getattr(gptworks, name)
        if isinstance(found, CallablePackage):
            assert found.__target__ == (module, attribute)
        else:
            assert found is getattr(import_module(module), attribute)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'.*Tokenizer"):
        gptworks.Trainr  # noqa: B018
