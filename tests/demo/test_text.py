from __future__ import annotations

import numpy as np

from gpusync.demo.text import batches, documentation, tokenize


def test_there_is_enough_real_text_on_this_python():
    text = documentation()
    assert "iterable" in text
    assert tokenize(text, 4096).size > 10_000


def test_tokens_are_ranks_by_frequency_and_rare_words_share_id_zero():
    np.testing.assert_array_equal(tokenize("b a a c. A b a", vocabulary=3), [2, 1, 1, 0, 0, 1, 2, 1])


def test_batches_are_consecutive_pieces_of_the_text_and_repeat_with_the_seed():
    tokens = np.arange(100)
    first = next(batches(tokens, batch=3, length=10, rng=np.random.default_rng(0)))
    again = next(batches(tokens, batch=3, length=10, rng=np.random.default_rng(0)))
    assert first.shape == (3, 10)
    assert (np.diff(first, axis=1) == 1).all()
    np.testing.assert_array_equal(first, again)
