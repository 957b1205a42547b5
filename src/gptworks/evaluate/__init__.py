"""Measuring a model on data. `gptworks.evaluate(model, data)` is `api.evaluate.evaluate`."""

from gptworks.callable_package import make_callable

make_callable(__name__, "gptworks.api.evaluate", "evaluate")
