"""The commands that read and write messages, one file each."""
