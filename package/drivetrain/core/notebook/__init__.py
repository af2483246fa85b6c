"""What notebooks show: tables, small curves and figures."""
