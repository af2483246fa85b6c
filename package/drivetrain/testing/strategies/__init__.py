"""The conformance suite of strategies, and the tasks and records that its checks share."""
