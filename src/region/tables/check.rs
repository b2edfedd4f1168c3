//! Walks everything and says what is wrong.
