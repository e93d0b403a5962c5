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

``summaries``          keys and values that replace those of many tokens, for each mechanism
``softmax_as_mean``    rewrites Fastformer and pooling by a softmax or a mean
``partition``          splits the graph into the graphs of both passes and of the outputs
``attention_stage``    the graphs of one attention
``recurrence_stage``   the graphs of one recurrence, or of a causal convolution
``recurrence_states``  the names of its states
``graph_parts``        parts of a graph as models of their own
``archive``            stores the graphs in the bundle
``other_summaries``    the summaries of all other chunks for each chunk
``spill``              values per token in files between layers
``opened_archive``     the engines of the graphs in the bundle
``token_outputs``      hands over the outputs per token, block by block
``recurrence_run``     runs the graphs of one recurrence
``pooled_values``      combines the values pooled from parts of a document
``runner``             runs the graphs, without torch

Tokens are appended to a document of a causal model at the cost of these tokens: one chunk runs
through all layers, and a state of constant size replaces the earlier chunks.

``incremental_model``  the public class
``append_model``       runs the graphs for new tokens
``append_plan``        checks that a model can do this, and lists the values that it keeps
``document_state``     the state, with its summaries in levels
``state_bytes``        saves and loads a state
``token_digest``       the digest of the tokens so far

``aftexport.chunked.token_flow`` checks that a graph can run in chunks.
"""
