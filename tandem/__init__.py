"""What every process and every client agrees on; free of torch."""
