"""The parts of a driver alone: its job, the output of its workers, notices of long waits."""
