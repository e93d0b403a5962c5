"""From an nn.Module to an ExportedProgram, with the errors explained."""
