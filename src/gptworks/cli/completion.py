"""gptworks completion SHELL: a completion script made from the parsers themselves."""

import argparse

HELP = "shell completion script for bash, zsh or fish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help='bash/zsh: eval "$(gptworks completion bash)"')


def run(args: argparse.Namespace) -> int:
    words = _words(args.parser)
    print(_fish(words) if args.shell == "fish" else _bash(words, zsh=args.shell == "zsh"))
    return 0


def options_of(parser: argparse.ArgumentParser, verb: str) -> list[str]:
    return _options(_subparsers(parser)[verb])


def takes_settings(parser: argparse.ArgumentParser, verb: str) -> bool:
    """Whether words such as optim.lr=1e-4 may stand alone."""
    return any(action.dest == "overrides" for action in _subparsers(parser)[verb]._actions)


def _words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """verb -> its options and sub-verbs; under "" the verbs themselves."""
    verbs = _subparsers(parser)
    words = {"": [*verbs, *_options(parser)]}
    for name, verb in verbs.items():
        inner = _subparsers(verb)
        words[name] = [*inner, *_options(verb), *(option for sub in inner.values() for option in _options(sub))]
    return {name: sorted(set(options)) for name, options in words.items()}


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _bash(words: dict[str, list[str]], zsh: bool) -> str:
    cases = "\n".join(f"    {verb}) words='{' '.join(options)}' ;;" for verb, options in words.items() if verb)
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_gptworks() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words='{" ".join(words[""])}' ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words='{" ".join(words[""])}'
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _gptworks gptworks"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c gptworks -n __fish_use_subcommand -a '{' '.join(v for v in words[''] if v[0] != '-')}'"]
    for verb, options in words.items():
        for option in options if verb else []:
            flag = (
                f"-l {option[2:]}"
                if option.startswith("--")
                else f"-s {option[1:]}"
                if option[0] == "-"
                else f"-a {option}"
            )
            lines.append(f"complete -c gptworks -n '__fish_seen_subcommand_from {verb}' {flag}")
    return "\n".join(lines)
