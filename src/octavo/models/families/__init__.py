"""One module a family of models; `registry` imports them on demand."""
