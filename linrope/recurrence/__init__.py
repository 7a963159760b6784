"""What the operation and the backends share: the record of a call, the state, packed sequences, chunks, decay."""
