/* Words that processes share: what was written before a store is seen by whoever has loaded its value. */
int64_t memferry_load_word(const int64_t *word);
void memferry_store_word(int64_t *word, int64_t value);
