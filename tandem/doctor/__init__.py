"""`tandem doctor`: what on this machine, or at an orchestrator, would keep Tandem from working, and what to do."""
