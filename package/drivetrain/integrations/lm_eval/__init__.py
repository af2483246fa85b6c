"""lm_eval: scores of language models by EleutherAI's evaluation harness."""
