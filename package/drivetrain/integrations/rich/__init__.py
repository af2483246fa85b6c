"""rich: the bar of `Trainer(progress_bar="rich")`."""
