"""Programs that ask a language model: ordinary functions as environments of text."""
