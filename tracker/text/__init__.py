"""Values as words, small pictures made of text, and files that appear whole."""
