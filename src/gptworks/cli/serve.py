"""gptworks serve: models over HTTP, in the words of OpenAI's API."""

import argparse

from gptworks.cli import options

HELP = "models over HTTP, for clients of OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="[NAME=]DIR",
        help="run folder, RUN@STEP, checkpoint of any known system, or name; --model may be left out; repeatable",
    )
    parser.set_defaults(most_models=None)  # for options.take_models
    options.add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: this machine only (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 = any that is free")
    parser.add_argument("--api-key", metavar="FILE", help="clients need one of the keys in this file, one per line")
    parser.add_argument("--open", action="store_true", help="allow clients from other machines without keys")
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="web pages of this origin may use the API; repeatable",
    )
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="rows computed together (default: 32)")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="rows that may wait (default: 256)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="most tokens of prompt and text (default: the model's)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="longest time for a request (default: 600)"
    )
    parser.add_argument("--watch", action="store_true", help="serve each new checkpoint of a run that is training")
    parser.add_argument("--no-page", action="store_true", help="the API alone, without the page at /")
    options.add_weights_option(parser)
    options.add_device_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.errors import UsageError

    for name in ("max_batch", "max_queue", "context", "timeout"):
        value = getattr(args, name)
        if value is not None and value < (0 if name == "max_queue" else 1):
            raise UsageError(f"--{name.replace('_', '-')} {value}: needs 1 or more.")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f'serve: needs the package {error.name}. Install it: pip install "gptworks[serve]"') from None
    return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from gptworks.serve import guard, http_server, served_model
    from gptworks.serve.app import application
    from gptworks.serve.service import Limits, Service

    keys = guard.read_keys(args.api_key) if args.api_key else []
    http_server.require_safe(args.host, has_keys=bool(keys), is_open=args.open)
    sources = served_model.named_sources(args.model)
    how = served_model.LoadOptions(
        weights=args.weights,
        device=args.device,
        tokenizer=args.tokenizer,
        shape=options.stated_model(args.override),
        max_batch=args.max_batch,
        context=args.context,
    )
    with http_server.bind(args.host, args.port) as bound:
        models = [served_model.load(name, source, how) for name, source in sources.items()]
        for served in models:
            print(f"gptworks serve: {served_model.description(served)}", flush=True)
        service = Service(models, Limits(max_queue=args.max_queue, timeout=args.timeout))
        is_local = guard.is_loopback(args.host)
        has_page = not args.no_page
        app = application(service, keys=keys, is_local=is_local, origins=args.allow_origin, has_page=has_page)
        server = http_server.Server(app, service, has_page=has_page)
        asyncio.run(http_server.serve(server, bound, how if args.watch else None))
    return 0
