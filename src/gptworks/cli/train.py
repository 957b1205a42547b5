"""gptworks train: pretrain or fine-tune."""

import argparse
import sys

from gptworks.cli import options

HELP = "pretrain or fine-tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config_options(parser)
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/NAME of the config or preset)")
    parser.add_argument("--resume", default="never", metavar="auto|never|DIR", help="go on from a checkpoint")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], help="where to compute")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show the plan, train nothing")
    parser.add_argument("--show-batch", action="store_true", help="print the first batch, decoded, and stop")


def run(args: argparse.Namespace) -> int:
    more = [f"run.device={args.device}"] if args.device else []
    config = options.load_config(args, *more, shape_of=options.shape_of_checkpoint).config
    if args.out or not config.run.out:
        folder = args.out or options.default_run_folder(args)
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": folder})})

    if args.show_batch:
        from gptworks.train.setup import prepare, show_first_batch

        print(show_first_batch(prepare(config)))
        return 0
    if args.dry_run:
        print(_plan(config))
        return 0
    from gptworks.train.loop import train

    train(config, resume_from=args.resume, command=["gptworks", *sys.argv[1:]])
    return 0


def _plan(config) -> str:  # type: ignore[no-untyped-def]
    from gptworks.plan import sizes
    from gptworks.train.setup import prepare

    setup = prepare(config)
    batch = setup.batch
    tokens = setup.last_step * batch.global_size * config.data.seq_len
    return "\n".join(
        [
            f"parameters       {sizes.num_parameters(config.model):,}",
            f"device           {setup.world.device}, {config.precision.compute}",
            f"samples          {setup.train_samples.per_epoch:,} per epoch of {config.data.seq_len} tokens",
            f"batch            {batch.global_size} = {batch.micro_size} micro-batch x {batch.accumulation} "
            "accumulation "
            f"x {batch.data_parallel} data-parallel",
            f"steps            {setup.last_step:,} ({tokens:,} tokens)",
            f"compute          {tokens * sizes.flops_per_token(config.model, config.data.seq_len):.3g} FLOP",
            f"one checkpoint   {sizes.checkpoint_bytes(config.model, config.checkpoint.portable) / 1e6:,.1f} MB",
            f"run folder       {config.run.out}",
            "nothing was written (--dry-run)",
        ]
    )
