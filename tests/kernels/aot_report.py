"""`python aot_report.py 90`: every configuration compiled for sm_90. A JSON line: name, registers, stack, opcodes."""

import json
import sys

from gpusync_kernels.device.configurations import configurations
from gpusync_kernels.device.disassembly import compile_for

for each in configurations():
    binary = compile_for(each, int(sys.argv[1]))
    print(json.dumps([each.name, binary.registers, binary.stack_bytes, binary.opcodes]), flush=True)
