"""Documents of any length in bounded memory, with the result of the whole document.

Between two attentions, every token is computed separately. An attention needs a token and a
*summary* of all others, because a few keys and values can replace a large set of them
(``summaries``). A document therefore runs chunk by chunk, layer by layer, in two passes: ``reduce``
summarizes the keys and values of every chunk; ``apply`` attends from each chunk to itself and to
the summaries of the other chunks. After the last layer, ``pool`` and ``head`` compute the outputs
per document, and ``tokens`` those per token.

A recurrence, or a causal convolution, has a *state* instead: the state after all tokens on the left
of a chunk, on its right, or on both sides. ``advance`` passes a state from chunk to chunk from
right to left; ``apply`` passes one from left to right and computes the values of the chunk.

A softmax attention has neither. It writes its keys and values to a file, and each chunk attends to
those that it sees, block by block: ``softmax_stage`` has its graphs. The results of two blocks are
merged by the sums of their weights.

To write the graphs, ``archive`` cuts the model's graph into parts, of which ``token_flow`` checks
that they can run in chunks; ``stages`` has the graphs of one attention or recurrence. To run them,
``runner`` goes through the stages with ``stage_runs``; a ``document`` keeps values in files between
layers. It needs no torch.

``windows`` reads a document over the limit of a model in windows, and makes one answer of theirs.

Tokens are appended to a document of a causal model at the cost of these tokens: one chunk runs
through all layers, and a state of constant size replaces the earlier chunks. The state has all keys
of a softmax attention without a window, so that one grows, up to a limit. ``incremental_model``
is the public class; ``append_model`` checks that a model can do this, and runs its graphs for new
tokens; ``document_state`` has the state, and its bytes.
"""
