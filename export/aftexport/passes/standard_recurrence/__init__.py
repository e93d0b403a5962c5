"""The recurrent operators of other domains, both ways.

ONNX has ``LinearAttention`` and ``CausalConvWithState`` since opset 27, and ONNX Runtime has both in
``com.microsoft``. A file with one of them is read into the operators of ``ai.aftexport``, and a file
with those can be written in the standard ones:

    node_values            attributes and shapes of a node, and the errors that name it
    read_linear_attention  LinearAttention -> RecurrentLinearAttention
    read_causal_conv       CausalConvWithState -> CausalDepthwiseConv
    translation            all nodes of a graph, with the transposes that cancel
    expansion              the standard nodes as the function bodies of onnx, which any runtime runs
    write_linear_attention, write_causal_conv, standard_form    the way back
"""
