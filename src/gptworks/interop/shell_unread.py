"""What a block holds that is not read here, also in branches that may never be taken: half a block would be worse than
none, so it is found before anything is worked out."""

from collections.abc import Iterator, Sequence

from gptworks.interop import shell_syntax
from gptworks.interop.shell_syntax import Branches, Chain, Loop, Node, Simple, Test
from gptworks.interop.shell_tokens import Piece, Word, alternative, refuse
from gptworks.interop.shell_words import PARAMETER, PATHS, would_start


def refuse_unread(nodes: Sequence[Node], name: str) -> None:
    """`name`: what the block is called in messages."""
    for node in nodes:
        for word in _words(node, name):
            _check_pieces(word.pieces, word.line, name)


def _words(node: Node, name: str) -> Iterator[Word]:
    if isinstance(node, Loop):
        yield from node.words
        bodies: Sequence[Sequence[Node]] = [node.body]
    elif isinstance(node, Branches):
        for condition, _ in node.conditions:
            yield from _words(condition, name)
        bodies = [*(body for _, body in node.conditions), node.otherwise]
    else:
        _check_joints(node, name)
        for item in node.items:
            yield from item.words if isinstance(item, Test) else _words_of_command(item, name)
        bodies = []
    for body in bodies:
        for inner in body:
            yield from _words(inner, name)


def _words_of_command(simple: Simple, name: str) -> Iterator[Word]:
    yield from (word for assignment in simple.assignments for word in assignment.words)
    yield from simple.words
    for redirection in simple.redirections:
        if redirection.target is None:
            continue
        if redirection.operator == "<" and redirection.target.literal != "/dev/null":
            raise refuse(name, simple.line, "< (text that is given to a program)")
        yield redirection.target
    if simple.tee is not None:
        yield from _words_of_command(simple.tee, name)


def _check_joints(chain: Chain, name: str) -> None:
    for joint, item in zip(chain.joints, chain.items[1:], strict=True):
        behind_command = joint == "||" and isinstance(item, Simple) and not isinstance(chain.items[0], Test)
        if behind_command and not (item.words and item.words[0].literal in ("exit", "true", ":")):
            raise refuse(name, item.line, "|| behind a command")


def _check_pieces(pieces: Sequence[Piece], line: int, name: str) -> None:
    for piece in pieces:
        if piece.kind == "variable":
            match = PARAMETER.fullmatch(piece.value)
            if match is None:
                raise refuse(name, line, f"${{{piece.value}}}")
            if match[1] in tuple("?$!-"):
                raise refuse(name, line, f"${match[1]}")
            if match[4]:
                _check_pieces(alternative(match[4], name, quoted=piece.quoted), line, name)
        elif piece.kind == "command":
            _check_program(piece.value, line, name)


def _check_program(text: str, line: int, name: str) -> None:
    """Refuse a $(...) that starts anything but the programs that are known."""
    inside = f"{name}, line {line}"
    for node in shell_syntax.parse(text, inside):
        items = node.items if isinstance(node, Chain) else ()
        if not items or not all(
            isinstance(item, Simple) and item.words and item.words[0].literal in PATHS for item in items
        ):
            raise would_start(name, line, text)
        refuse_unread([node], inside)
