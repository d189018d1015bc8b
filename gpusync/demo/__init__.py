"""`gpusync demo`: real optimizer steps, published, pulled and verified on any machine with numpy."""

from gpusync.demo.run import DemoResult, DemoRow, run_demo

__all__ = ["DemoResult", "DemoRow", "run_demo"]
