"""What tests of users and of third-party strategies and storage need: real processes, planted faults."""
