"""How the shipped checkpoints were made: prompts -> stories, with a grammar's -> tokenizer -> target -> draft.

Nothing here is needed to run the engine. `python -m mrv2lab.model.training --help` runs it all.
"""
