"""Answer quality: HumanEval, ROUGE-L and bits per byte, of a model and against its base."""
