"""The command ``aftexport unfuse BUNDLE|IN.onnx OUT.onnx``."""

from pathlib import Path

from rich.console import Console

from aftexport.system.arguments import make_parser, positive

_EPILOG = """\
Every operator of ai.aftexport becomes its fallback, in the opset of the model. The file
then has no functions, and runs in runtimes that do not read them.

With --opset 27, RecurrentLinearAttention and CausalDepthwiseConv become LinearAttention and
CausalConvWithState, which ONNX has since that opset. ONNX Runtime 1.31 loads it only with
ALLOW_RELEASED_ONNX_OPSET_ONLY=0 in its environment. Nodes with direction reverse or
bidirectional, or with a normalizer, become fallbacks: ONNX has no such form.

  aftexport unfuse model.bundle plain.onnx
  aftexport unfuse model.bundle/model.onnx standard.onnx --opset 27

Exit status:
  0  the file was written
  1  the outputs differ; nothing was written
  2  the input is invalid; nothing was written
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = make_parser(
        "aftexport unfuse",
        "Write a model with operators of ai.aftexport in standard operators only.",
        _EPILOG,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="a bundle, or an ONNX model of up to 2 GiB")
    add("target", type=Path, metavar="OUT", help="path of the resulting ONNX model")
    add("--opset", type=positive, metavar="N",
        help="27 or later: write the recurrent operators as those of ONNX (default: fallbacks in "
        "the opset of the model)")  # fmt: skip
    options = parser.parse_args(words)

    from aftexport.bundle.output_path import check_can_be_made
    from aftexport.recognition.standard_file import unfuse_file
    from aftexport.system.console import escape, plain_table, stage

    check_can_be_made("OUT", options.target)
    console = Console(emoji=False)
    with stage(console, f"Writing {options.target}"):
        form = unfuse_file(options.source, options.target, options.opset)
    table = plain_table("operator", "nodes", "written as", "because")
    for (operator, standard), count in sorted(form.standard.items()):
        table.add_row(operator, str(count), standard, "")
    for (operator, reason), count in sorted(form.bodies.items()):
        table.add_row(operator, str(count), "fallback", reason)
    console.print(table)
    console.print(f"Model: [bold]{escape(str(options.target))}[/]", soft_wrap=True)
    return 0
