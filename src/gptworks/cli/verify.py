"""gptworks verify: is a dataset or checkpoint whole? Does a layout compute what one process computes?"""

import argparse
import json
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.cli import options
from gptworks.errors import UsageError

HELP = "is a dataset or checkpoint whole; does a layout equal one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", nargs="?", help="a dataset (prefix, file or folder), run or checkpoint")
    options.add_config_options(parser)
    layout = parser.add_argument_group("a layout against one process")
    layout.add_argument("--layout", metavar="NAME", help="such as tp2.pp2 (default: that of the configuration)")
    layout.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    size = layout.add_mutually_exclusive_group()
    size.add_argument("--shrink", action="store_true", help="compare a smaller model, cut in the same way")
    size.add_argument(
        "--full", action="store_true", help="never shrink; by default only a model that is too large is shrunk"
    )
    layout.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (default: cpu)")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.config or args.preset or args.layout:
        return _verify_layout(args)
    if args.path is None:
        raise UsageError(
            "verify: nothing to verify. Needed: a dataset, run or checkpoint, or -c FILE --layout tp2.pp2 for a layout."
        )
    if args.override or args.overrides:
        raise UsageError(f"verify: {(args.override + args.overrides)[0]}: {args.path} is one path, and there is no -c.")
    path = Path(args.path)
    if run_paths.is_run(run_paths.run_of(path)) or run_paths.is_checkpoint(path):
        return _verify_checkpoint(path, as_json=args.json)
    return _verify_dataset(args.path, as_json=args.json)


def _verify_layout(args: argparse.Namespace) -> int:
    from gptworks.config.derive import Layout
    from gptworks.verify.layout import verify_layout

    if args.path is not None and "=" in args.path:  # a bare KEY=VALUE
        args.overrides.insert(0, args.path)
    elif args.path is not None and not args.config and (Path(args.path) / run_paths.CONFIG).is_file():
        args.config = str(Path(args.path) / run_paths.CONFIG)  # a run: with its own configuration
    elif args.path is not None:
        raise UsageError(
            f"verify: {args.path}: a layout is compared for a configuration. Needed: -c FILE, or a run folder."
        )
    loaded = options.load_config(args, f"run.device={args.device}", shape_of=options.shape_of_checkpoint)
    layout = Layout.parse(args.layout) if args.layout else Layout.from_config(loaded.config.parallel)
    shrink = "always" if args.shrink else "never" if args.full else "auto"
    result: Any = verify_layout(loaded.config, layout, steps=args.steps, shrink=shrink)
    if isinstance(result, int):
        return result
    print(json.dumps(result.as_dict()) if args.json else result.text().rpartition("\n\n")[0], flush=True)
    result.require_equal()
    if not args.json:
        print(f"\n{result.verdict}")
    return 0


def _verify_checkpoint(path: Path, *, as_json: bool) -> int:
    from gptworks.checkpoint import manifest as manifests
    from gptworks.checkpoint.folder import CheckpointFolder, find

    folders = [path]
    if not run_paths.is_checkpoint(path):
        run = run_paths.run_of(path)
        folders = [folder for _, folder in sorted(CheckpointFolder(run).steps().items())] or [find(path)]
    results = []
    for folder in folders:
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest)
        num_bytes = sum(entry["bytes"] for entry in manifest.files.values())
        results.append({"path": str(folder), "step": manifest.step, "files": len(manifest.files), "bytes": num_bytes})
        if not as_json:
            files = f"{len(manifest.files)} files, {num_bytes:,} bytes"
            print(f"{folder}: whole (step {manifest.step:,}; {files}; hashes agree)")
    if as_json:
        print(json.dumps(results))
    return 0


def _verify_dataset(path: str, *, as_json: bool) -> int:
    from gptworks.data.inspect import damage_in
    from gptworks.data.store import Store, locate_stores
    from gptworks.errors import DataError

    results: list[dict[str, object]] = []
    damage: list[str] = []
    for located in locate_stores(path):
        try:
            store = Store(located)  # lengths, offsets and counts are checked by opening it
        except DataError as error:
            damage.append(str(error))
            continue
        wrong = damage_in(store)
        damage += wrong
        if wrong:
            continue
        hashed = sorted(store.sidecar.sha256) if store.sidecar else []
        counts = {"path": str(store.file), "format": located.format.NAME, "tokens": len(store.tokens)}
        results.append({**counts, "checksums": hashed})
        if not as_json:
            by = "checksums, counts and ids agree" if hashed else "counts and ids agree; no sidecar, so no checksums"
            documents = f"{store.num_documents:,} documents, " if store.contents.has_documents else ""
            print(f"{store.file}: whole ({documents}{len(store.tokens):,} tokens; {by})")
    if damage:
        raise DataError("\n".join([*damage, "Copy it again from where it was whole, or prepare the data again."]))
    if as_json:
        print(json.dumps(results))
    return 0
