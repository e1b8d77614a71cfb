"""EAGLE-3 speculative decoding in JAX: train a draft head, decode faster, change nothing in the text.

One letter per dimension everywhere, in array names (`q_BTNH`), annotations and docstrings:

    B  batch rows                        V  target vocabulary
    T  tokens of one pass                U  draft vocabulary
    D  hidden width                      S  cache slots
    A  fused features, taps x D          M  nodes of a draft tree, the root included
    N  query heads                       J  training-time-test steps
    K  key/value heads                   L  target blocks
    H  head width                        R  keys of a pass (tokens of the pass and drafted ones before it)
    F  feed-forward width                C  rows written by one cache append
"""
