"""The training loop and what it is made of. `gptworks.train(config)` is `loop.train`."""

from gptworks.callable_package import make_callable

make_callable(__name__, "gptworks.train.loop", "train")
