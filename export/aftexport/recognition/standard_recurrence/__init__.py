"""The recurrent operators of other domains, both ways.

ONNX has ``LinearAttention`` and ``CausalConvWithState`` since opset 27, and ONNX Runtime has both
in ``com.microsoft``. They are read into the operators of ``ai.aftexport``, and these can be written
as the standard ones:

    full_lengths, padding  lengths, which the other operators lack, and the masks that replace them
    node_values            attributes and shapes of a node, and the errors that name it
    node_reading           a node that is read as an operator of ours
    read_linear_attention  LinearAttention -> RecurrentLinearAttention
    read_causal_conv       CausalConvWithState -> CausalDepthwiseConv
    translation            all nodes of a graph, with the transposes that cancel
    value_shapes           inferred shapes of a graph with our operators
    expansion              the standard nodes as the function bodies of onnx, which any runtime runs
    write_linear_attention, write_causal_conv, standard_form    the way back
"""
