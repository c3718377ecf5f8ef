"""The parts of `scripts/train_demo_pair.py`: corpus, optimizer, target, drafter, evaluation."""
