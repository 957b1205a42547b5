"""Text out of a model. `gptworks.generate(model, "Once upon a time")` is `engine.generate`."""

from gptworks.callable_package import make_callable

make_callable(__name__, "gptworks.generate.engine", "generate")
