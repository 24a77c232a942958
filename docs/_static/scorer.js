// The order of search results: guides first, then examples, evidence and internals.
var Scorer = {
  score: ([page, , , , score]) => {
    const later = /^(examples\/|exactness_measured|performance|compatibility|chaos|architecture|tensorflow_facts|contributing|roadmap)/;
    return later.test(page) ? score / 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
