package e2e

// suite is a package whose tests touch the database.
type suite struct {
	name string
	few  []string // what make test runs: most statements; make test-long runs all but never

	// pooled names those that make test runs behind a pooler: they lean on what a session or a
	// transaction keeps. The statements are those of lib/pq straight to the server.
	pooled []string

	// never names tests that have nothing to do with how PostgreSQL is reached, or that
	// are of one way: SQLite, a private server, settings of one session, a backlog of lib/pq's,
	// a server that cuts the connections of one pool.
	never []string
}

var suites = []suite{
	{
		name: ".",
		few: []string{
			"TestFromPgx_PassesStatementsOnAndNeverEndsTheTransaction",
			"TestFromPgx_ServesThePublishers",
			"TestMigrate_TenProcessesAtOnce",
		},
		pooled: []string{
			"TestMigrate_TenProcessesAtOnce",
		},
		never: []string{
			"ExampleSQLiteDSN",
			"TestCheckSQLite_NamesEachSettingThatIsWrong",
			"TestMigrate_ReportsALockOnSQLite",
			"TestSQLiteDSN_OpensTheFileOfThatName",
			"TestSQLiteDSN_ConfiguresEveryConnection",
			"TestSQLiteDSN_TakesARelativePath",
			"TestSQLiteDSN_TheLogShrinks",
			"TestSQLiteDSN_WritersWaitAndReadersDoNot",
		},
	},
	{
		name: "outbox",
		few: []string{
			"TestCheck_RefusesASequenceBehindTheHistory",
			"TestHistory_DaysAreMadeAhead",
			"TestPlans_TheLibraryPreparesNothing",
			"TestPublish_ReturnsWhatTheDatabaseSays",
			"TestPublish_SavepointsDecideOnTheirMessages",
			"TestPublish_TopicsIDsAndKeysRoundTrip",
			"TestPublish_WhatIsReadIsWhatWasPublished",
			"TestRead_PassesOverBusyKeys",
			"TestRead_StopsALaneOnceItHasTheBytes",
			"TestRemove_KeepsTheRowInTheHistory",
			"TestRemove_MatchesEveryMicrosecond",
			"TestRepairSequence_MendsWhileOthersPublish",
			"TestRunInTx_ALostAnswerOfTheCommitIsUnknown",
			"TestRunInTx_AnOverlookedErrorIsADefiniteFailure",
			"TestRunInTx_RetriesASerializationFailureOfTheCommit",
		},
		pooled: []string{
			"TestPlans_TheLibraryPreparesNothing",
			"TestPublish_NeedsNoSecondConnection",
			"TestRemove_KeepsTheRowInTheHistory",
			"TestRing_NeverDestroysACommittedRow",
			"TestRunInTx_ManyAtOnceAllSucceed",
		},
		never: []string{
			"TestHistory_OnSQLiteExpiredRowsAreDeletedInPieces",
			"TestHistory_OnSQLiteLargeRowsAreDeletedAFewAtATime",
			"TestPlans_NeverSortNorScanWhateverTheTableWasLikeBefore",
			"TestPlans_OnSQLiteEachLaneIsReadByItsIndex",
			"TestRemove_SparesNewRowsAfterACrashThatLostCommits",
			"TestRing_LosesNothingWhileItGoesRound",
			"TestSQLite_ACanceledBeginLeavesNothingOpen",
			"TestSQLite_AFullDiskDropsNoHistory",
			"TestSQLite_AHandlerWhoseContextEndedKeepsNobody",
			"TestSQLite_ALostTransactionPublishesNothing",
			"TestSQLite_KnowsThatItsFileIsGone",
			"TestSQLite_RefusesATransactionInsideAnother",
			"TestSQLite_TheFirstTransactionChecksTheSettings",
			"TestSQLite_TwoHandlesShareAFile",
			"TestSQLite_WaitsNoLongerThanTheContext",
			"TestSQLite_WaitsOnceWithoutADeadline",
		},
	},
	{
		name: "inbox",
		few: []string{
			"TestGroup_PreparesWhatItsHandlersRepeat",
			"TestGroup_SharesOneTransaction",
			"TestInbox_WritesReturnedMessagesToTheOutbox",
			"TestPostgres_HandlerHasTheIsolationOfTheInboxAndItsOwnLockTimeout",
			"TestPostgres_LostAnswerOfTheCommitIsResolvedByTheRedelivery",
			"TestPostgres_LostConnectionLeavesNothing",
			"TestSeal_CommitOfAHandlerFailsInTheDatabase",
			"TestSeal_IDsAreNotCommittedByHand",
			"TestTx_ExecutesQueriesAndPreparedStatements",
			"TestTx_SavepointsWork",
		},
		pooled: []string{
			"TestGroup_SharesOneTransaction",
			"TestInbox_ContextThatEndsRollsBack",
			"TestInbox_WorksOnOneConnection",
			"TestPostgres_HandlerHasTheIsolationOfTheInboxAndItsOwnLockTimeout",
		},
		never: []string{
			"TestSQLite_BusyDatabaseComesAgain",
			"TestSQLite_FailedStatementThatEndsNothingMayBeOverlooked",
			"TestSQLite_InterruptedReadEndsNothing",
			"TestSQLite_TransactionThatTheDatabaseEndsIsNoticed",
			"TestSeal_SQLiteNeedsForeignKeys",
		},
	},
	{
		name: "internal/relaystore",
		few: []string{
			"TestLeases_AGuardedTransactionThatIdlesIsEndedByTheServer",
			"TestLeases_ALockedRowOfAnotherWorkerKeepsNoHeartbeatWaiting",
			"TestLeases_AMessageAloneInFlightIsHandedOver",
			"TestLeases_BeatShowsTheWorkerAndExtendsItsLanes",
			"TestLeases_ExpireFormerEndsThoseOfTheSameName",
			"TestLeases_ManyTakersShareNoLane",
			"TestLeases_ReleaseAndLeave",
			"TestLeases_TakeGivesFreeLanesWithANewEpoch",
			"TestRetries_ABrokenHistoryStopsNothing",
			"TestRetries_ALetterHoldsTheWholeMessageAndWhy",
			"TestRetries_APieceIsOfTheVersionThatWasLookedAt",
			"TestRetries_AReplayComesBackInItsPlace",
			"TestRetries_ASettlementSeesTheFollowerThatItWaitedFor",
			"TestRetries_AgreesWithAModel",
			"TestRetries_FollowMovesTheRowsOfKeys",
			"TestRetries_LooksBringWhatTheWayCarries",
		},
		pooled: []string{
			"TestLeases_AGuardedTransactionThatIdlesIsEndedByTheServer",
			"TestLeases_ALockedRowOfAnotherWorkerKeepsNoHeartbeatWaiting",
			"TestLeases_ManyTakersShareNoLane",
			"TestRetries_ASettlementSeesTheFollowerThatItWaitedFor",
		},
		never: []string{
			"TestPlans_FailWithoutAnIndex",
			"TestPlans_NoStatementScansATable",
			"TestPlans_TouchNothingElse",
			"TestRetries_OnSQLiteGivesWay",
		},
	},
	{
		name: "relay",
		few: []string{
			"TestRelay_PublishesNothingAgainWhileDeletionsFail",
			"TestRelay_RepeatsNothingOverCleanStops",
			"TestRelay_WorksUnderAnyDefaultIsolation",
		},
		pooled: []string{
			"TestRelay_PublishesNothingAgainWhileDeletionsFail",
			"TestRelay_RepeatsNothingOverCleanStops",
		},
		never: []string{
			"TestEngine_ACommandThatIsImpossibleKeepsNoOther",
			"TestEngine_ADeletionThatFailsStopsNeitherReadsNorLanes",
			"TestEngine_AKeyThatCannotBeSweptKeepsNoOther",
			"TestEngine_AKeyWhoseFailureCannotBeWrittenLeavesRoom",
			"TestEngine_ALoneUnclearMessageFindsOutThatTheSinkIsUpAgain",
			"TestEngine_ALostConnectionDelaysParkedMessagesALittle",
			"TestEngine_AReadThatOutlivesItsLeaseCountsForNothing",
			"TestEngine_ASeedRepeatsItsSchedule",
			"TestEngine_AnAnnouncementEndsWithItsKeysState",
			"TestEngine_AnotherProbeFollowsOneWhoseLaneIsLost",
			"TestEngine_ChargesALoneUnclearMessageInTheEnd",
			"TestEngine_CountsTheTimeLimitFromTheFirstFailure",
			"TestEngine_EndsTheCautionInABacklog",
			"TestEngine_FailuresThatCannotBeWrittenTakeBoundedMemory",
			"TestEngine_BlamesSeveralUnclearMessages",
			"TestEngine_ForgetsCircuitsWithoutMessages",
			"TestEngine_ForgetsWhatWasReadFromADatabaseThatMayBeAnother",
			"TestEngine_HasRoomForLargeMessages",
			"TestEngine_IsNotDueInThePast",
			"TestEngine_KeepsItsPromisesUnderAnySchedule",
			"TestEngine_KeepsWhatItsFunctionPanicsAt",
			"TestEngine_KnowsRowsThatAreBeingDeletedWhenALaneComesBack",
			"TestEngine_LearnsWhatTheWayCarriesFromReadsAlone",
			"TestEngine_LeavesADeadTopicBehindAfterAnOutage",
			"TestEngine_LivesWithAWriteThatIsImpossible",
			"TestEngine_LockedRowsAreTriedAgainApart",
			"TestEngine_LooksAheadTakeBoundedMemory",
			"TestEngine_LooksForDueRowsUnderLoad",
			"TestEngine_LooksForSmallMessagesBesideLargeOnes",
			"TestEngine_LooksForWhatTheWayCarries",
			"TestEngine_NarrowsReadsThatFail",
			"TestEngine_OneRowOfParkedThatCannotBeDeletedKeepsNoOther",
			"TestEngine_OneRowThatCannotBeDeletedKeepsNoOther",
			"TestEngine_PollsWhileALargeMessageComes",
			"TestEngine_ProbesAStuckTopicFromALaneThatCanPublish",
			"TestEngine_PutsALaneOffWhoseLargeMessageCannotBeRead",
			"TestEngine_ReadsALaneAgainSoonWhoseLargeMessageWaitsForOthers",
			"TestEngine_ReadsALaneWithManyLockedRows",
			"TestEngine_ReadsWhatTheWayCarries",
			"TestEngine_SettlesWhatAFormerOwnerConfirmed",
			"TestEngine_SweepsAKeyThatMakesReadsSlow",
			"TestEngine_SweepsAKeyWhateverItsReadsHadForAnExcuse",
			"TestEngine_SweepsNoKeyForASlowWay",
			"TestEngine_TakesConfirmsHoweverLate",
			"TestEngine_TriesALaneThatCannotBeReadRarely",
			"TestEngine_TriesALoneUnclearMessageOfARecoveringTopic",
			"TestFromPublisher_DeliversToStockWatermillAMQP",
			"TestRelay_IsNotDelayedByAnOpenReaderOfSQLite",
			"TestRelay_KeepsItsPromisesInOtherOrders",
			"TestRelay_KeepsItsPromisesOnPostgreSQL",
			"TestRelay_KeepsItsPromisesOnSQLite",
			"TestRelay_LosesAndRepeatsNothingWhileItsConnectionsAreCut",
			"TestRelay_ResumesAfterPostgresWasAway",
			"TestRelay_ResumesWhenItsDatabaseComesBack",
			"TestRun_EndsWhenTheFileOfSQLiteWasReplaced",
		},
	},
	{
		name: "idempotency",
		few: []string{
			"TestGroup_SharesOneTransaction",
		},
		pooled: []string{
			"TestGroup_SharesOneTransaction",
		},
		never: []string{
			"TestEngine_AbandonsWhatHasNoDeadlineOfItsOwn",
			"TestEngine_PurgesWhatIsToBeForgotten",
			"TestEngine_RefusesToSettleWithWhatIsNoAnswer",
			"TestEngine_RunNeedsTheTables",
			"TestEngine_SettlesACommand",
			"TestEngine_SettlesAnUnknownOutcome",
			"TestPurge_OnSQLiteGivesWay",
			"TestTxMiddleware_AStaleOwnerIsRolledBackOnSQLite",
			"TestTxMiddleware_NothingCommitsAloneAfterSQLiteHasEndedTheTransaction",
		},
	},
	{
		name: "idempotency/storetest",
		few: []string{
			"TestStore_OnPostgreSQL",
			"TestStore_OnPostgreSQLPrepared",
		},
		pooled: []string{
			"TestStore_OnPostgreSQL",
		},
		never: []string{
			"TestStore_OnSQLite",
		},
	},
}

var (
	// pgx does not ask the server to cancel a commit, and as it comes it keeps
	// statements prepared.
	notPgx = skips{
		"outbox": {
			"TestRunInTx_ACommitThatTheServerCancelsIsADefiniteFailure",
		},
		"inbox": {
			"TestGroup_OpenRowsSpoilNobody",
			"TestGroup_PreparesNothingWhereNamesAreTaken",
		},
	}

	// As it comes, and with no pooler.
	notPgxAsItComes = skips{
		"outbox": {
			"TestPlans_TheLibraryPreparesNothing",
		},
	}

	// These wait long, and are not about a pooler.
	notAgain = skips{
		"relay": {
			"TestRelay_DeliversBesideAFullDisk",
			"TestRelay_DeliversBesideALockedMessageThatWaits",
			"TestRelay_DeliversBesideALockedTable",
			"TestRelay_DeliversBesideLockedRows",
			"TestRelay_DeliversBesideManyLockedRowsOfALane",
			"TestRelay_DeliversWhateverStatementIsSilenced",
			"TestRelay_StopsWhileItsDatabaseIsSilent",
			"TestRelay_WorksUnderTheAdministratorsLimits",
		},
	}

	// In these a handler or a store prepares statements, which a pooler does not allow.
	notPooled = skips{
		"outbox": {
			"TestPublish_KeepsItsStatementPrepared",
		},
		"inbox": {
			"TestGroup_PreparesNothingWhereNamesAreTaken",
			"TestTx_ExecutesQueriesAndPreparedStatements",
			"TestTx_IsRefusedAfterTheHandlerHasReturned",
		},
		"idempotency/storetest": {
			"TestStore_OnPostgreSQLPrepared",
		},
	}

	// These hold one transaction of a pool while they want another of it.
	notOne = skips{
		"inbox": {
			"TestBrakes_AnIsolatedMessageIsAloneForAShortTime",
			"TestBrakes_TroubleOfOneLeavesTheOthersTheirRate",
			"TestInbox_DifferentMessagesDoNotWaitForEachOther",
			"TestPostgres_CopyOfAMessageBeingHandledComesAgain",
			"TestPostgres_CopyThatSeesTheFirstCommitIsADuplicateOrComesAgain",
			"TestTx_IsRefusedOnceItsContextHasEnded",
		},
		"relay": {
			"TestRelay_PublishesNothingAgainWhileRowsAreLocked",
		},
	}

	everySkip = []skips{notPgx, notPgxAsItComes, notAgain, notPooled, notOne}
)
