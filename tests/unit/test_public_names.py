"""What `import gptworks` offers, before and after its packages have been imported."""

import pytest

import gptworks


def test_every_public_name_is_there() -> None:
    for name in gptworks.__all__:
        assert getattr(gptworks, name) is not None


def test_functions_stay_callable_when_their_packages_are_imported() -> None:
    import gptworks.generate.engine
    import gptworks.train.loop

    for _ in range(2):
        with pytest.raises(gptworks.GPTWorksError, match=r"run\.out: not set"):
            gptworks.train(gptworks.load_config(preset="tiny"))
        with pytest.raises(gptworks.GPTWorksError, match="without a tokenizer"):
            gptworks.generate(gptworks.GPT(gptworks.load_config(preset="tiny-4k").model), "Hello")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'.*Tokenizer"):
        gptworks.Trainr  # noqa: B018
