"""Tables, small curves and figures for notebooks."""
